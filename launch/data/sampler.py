"""The row at each position of a training run, as a pure function of the position.

The stream of rows is infinite, and divided into epochs of `size` positions: position p is in epoch
p // size. In an epoch every row occurs exactly once, in a pseudorandom order keyed by (seed,
epoch). So a run resumes from one integer, no row is dropped at the end of an epoch, and the rows of
a step do not depend on the number of workers.

The order is a Feistel network over the smallest power of two that is at least `size` (two halves of
nearly equal width, mixed by splitmix64's finalizer), applied repeatedly until the value is below
`size` (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Any
position is computed in constant expected time and memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainload.core.errors import DataError

Rows = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 24  # with fewer rounds the orders of a handful of rows are not equally likely


def rows(seed: int, size: int, start: int, count: int) -> Rows:
    """Return the rows at positions [start, start + count) of the shuffled stream: (count,) int64,
    each in [0, size).

    Law: rows(s, n, a, b + c) is rows(s, n, a, b) followed by rows(s, n, a + b, c).

    Raises:
        DataError: size < 1, start < 0 or count < 0.
    """
    _check(size, start, count)
    positions = np.arange(start, start + count, dtype=np.uint64)
    epochs, offsets = np.divmod(positions, np.uint64(size))
    keys = _mix(_mix(epochs + np.uint64(_GOLDEN)) ^ np.uint64(_seed_word(seed)))
    bits = max(2, (size - 1).bit_length())
    order = _permute(offsets, keys, bits)
    outside = np.flatnonzero(order >= size)
    while outside.size:
        order[outside] = _permute(order[outside], keys[outside], bits)
        outside = outside[order[outside] >= size]
    return order.astype(np.int64)


def sequential(size: int, start: int, count: int) -> Rows:
    """Return the rows at positions [start, start + count) in the dataset's own order, which wraps
    around: (count,) int64.

    It is used for evaluation. The errors are those of `rows`.
    """
    _check(size, start, count)
    return np.arange(start, start + count, dtype=np.int64) % size


def _check(size: int, start: int, count: int) -> None:
    if size < 1 or start < 0 or count < 0:
        raise DataError(
            "invalid positions in a stream of rows",
            expected="size >= 1, start >= 0, count >= 0",
            got=f"size {size}, start {start}, count {count}",
        )


def _permute(values: _Words, keys: _Words, bits: int) -> _Words:
    """Apply the network once to (n,) values in [0, 2**bits) with (n,) keys; it is a bijection for
    each key.
    """
    widths = (bits // 2, bits - bits // 2)
    left, right = values >> np.uint64(widths[1]), values & np.uint64((1 << widths[1]) - 1)
    for number in range(_ROUNDS):
        # The halves may differ in width. They are mixed in turn instead of swapped, so that each
        # keeps its width.
        constant = np.uint64((number + 1) * _GOLDEN & _WORD)
        if number % 2 == 0:
            left = left ^ (_mix(right + keys ^ constant) >> np.uint64(64 - widths[0]))
        else:
            right = right ^ (_mix(left + keys ^ constant) >> np.uint64(64 - widths[1]))
    return (left << np.uint64(widths[1])) | right


def _mix(words: _Words) -> _Words:
    """Apply splitmix64's finalizer (Steele, Lea and Flood, 2014) to each word, with arithmetic
    modulo 2**64.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _seed_word(seed: int) -> int:
    """Mix a seed into 64 bits."""
    return int(_mix(np.array([(seed * _GOLDEN + _GOLDEN) & _WORD], dtype=np.uint64))[0])
