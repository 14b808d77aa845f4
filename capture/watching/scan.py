"""torch's associative scan along a dim of fixed length, as slices and vmaps of the function that combines two entries.

torch's own way in eager mode, and the same order of combining, so that values and gradients are eager's to the bit. torch.export would
trace it through vmap's inner workings, which take the number of rows for a constant.

The algorithm is that of Guy E. Blelloch, "Prefix sums and their applications" (1990), in the form that jax.lax.associative_scan has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainload.capture.source.patched import OPERATORS
from trainload.capture.watching.nest import mapped

_ORIGINAL: tuple[Callable[..., Any], ...] = tuple(filter(None, [getattr(sys.modules.get(OPERATORS), "associative_scan", None)]))
"""torch's function; none where this torch has none: it is a prototype. In a tuple, so that the watch does not replace it here too."""

Leaves = list[Tensor]


def replacements(vmap: Callable[..., Any]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """`associative_scan` -> what stands for it while tracing. `vmap`: what stands for torch.func's."""
    return {original: _scan_by(vmap, original) for original in _ORIGINAL}


def _scan_by(vmap: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """What follows torch's arguments. Its own code takes what it refuses in eager mode too, and a length that changes."""

    def associative_scan(
        combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        leaves = _leaves(xs)
        if combine_mode != "generic" or not leaves or not all(_has_length(x, dim) for x in leaves):
            return original(combine_fn, xs, dim, reverse, combine_mode)

        def combine(*both: Tensor) -> tuple[Tensor, ...]:
            left, right = iter(both[: len(leaves)]), iter(both[len(leaves) :])
            return tuple(_leaves(combine_fn(mapped(xs, lambda _: next(left)), mapped(xs, lambda _: next(right)))))

        def combined(left: Leaves, right: Leaves) -> Leaves:
            return list(vmap(combine)(*left, *right))

        first = [x.movedim(dim, 0) for x in leaves]
        scanned = _scan(combined, [x.flip(0) for x in first] if reverse else first)
        found = iter([(x.flip(0) if reverse else x).movedim(0, dim) for x in scanned])
        return mapped(xs, lambda _: next(found))

    return associative_scan


def _has_length(x: Tensor, dim: int) -> bool:
    """Whether a dim is there, and its length is a number, not 0."""
    return -x.ndim <= dim < x.ndim and isinstance(x.shape[dim], int) and x.shape[dim] > 0


def _leaves(tree: Any) -> Leaves:
    found: Leaves = []
    mapped(tree, found.append)
    return found


def _scan(combined: Callable[[Leaves, Leaves], Leaves], entries: Leaves) -> Leaves:
    """The running combination along dim 0: what stands at odd places is the scan of combined pairs, the rest follows from it."""
    length = entries[0].shape[0]
    if length < 2:
        return entries
    odd = _scan(combined, combined([x[: length - 1 : 2] for x in entries], [x[1::2] for x in entries]))
    even = [x[:1] for x in entries]
    before = (length - 1) // 2
    if before:
        later = combined([x[:before] for x in odd], [x[2::2] for x in entries])
        even = [torch.cat([first, rest]) for first, rest in zip(even, later, strict=True)]
    return [_interleaved(a, b) for a, b in zip(even, odd, strict=True)]


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    """Entries of two tensors by turns; `even` has as many as `odd` or one more."""
    pairs = torch.stack([even[: odd.shape[0]], odd], 1).flatten(0, 1)
    return pairs if even.shape[0] == odd.shape[0] else torch.cat([pairs, even[odd.shape[0] :]])
