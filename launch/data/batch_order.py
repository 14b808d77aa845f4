"""Which part of a mixture a global batch is from, and which of its rows, as a pure function of the batch's number.

The stream of global batches is cut into cycles. In each cycle every part has a fixed number of batches, in a pseudorandom order keyed by
(seed, cycle). A part's own batches follow each other in its own shuffled stream of rows, so that every row of it comes once in each of its
epochs, however the parts are mixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from trainload.launching.data.sampler import Rows, rows

LONGEST_CYCLE = 1024
"""Global batches. Weights that need a longer one are rounded to it."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """The global batches of a run, by number.

    Laws: within each cycle of sum(counts) batches part i has counts[i]; one part alone is read as it is without a mixture.

    Attributes:
        seed: of the run's data.
        sizes: rows of each part.
        counts: global batches of each part in a cycle, each 1 or more.
    """

    seed: int
    sizes: tuple[int, ...]
    counts: tuple[int, ...] = (1,)

    def part(self, number: int) -> tuple[int, int]:
        """The part that global batch `number` is from, and how many batches of that part came before."""
        if len(self.sizes) == 1:
            return 0, number
        length = sum(self.counts)
        cycle, place = divmod(number, length)
        order = np.repeat(np.arange(len(self.counts)), self.counts)[rows(_seed(self.seed, "order"), length, cycle * length, length)]
        part = int(order[place])
        return part, cycle * self.counts[part] + int(np.count_nonzero(order[:place] == part))

    def rows(self, part: int, before: int, whole: int, first: int, count: int) -> Rows:
        """Rows `first` to `first + count` of a global batch of `whole` rows: the one of `part` that `before` others of it came before."""
        seed = self.seed if len(self.sizes) == 1 else _seed(self.seed, str(part))
        return rows(seed, self.sizes[part], before * whole + first, count)


def cycle_counts(weights: Sequence[float | int]) -> tuple[int, ...]:
    """How many global batches of a cycle each part has: in proportion to the weights, exactly where LONGEST_CYCLE batches allow it.

    Args:
        weights: positive, at most LONGEST_CYCLE of them.

    Returns:
        Numbers without a common divisor, each 1 or more.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    whole = lcm(*(fraction.denominator for fraction in exact))
    numbers = [int(fraction * whole) for fraction in exact]
    common = gcd(*numbers)
    numbers = [number // common for number in numbers]
    total = sum(numbers)
    if total <= LONGEST_CYCLE:
        return tuple(numbers)
    shares = [Fraction(number * LONGEST_CYCLE, total) for number in numbers]
    counts = [max(1, int(share)) for share in shares]
    while sum(counts) > LONGEST_CYCLE:  # what was lifted to 1 is taken from the greatest
        counts[counts.index(max(counts))] -= 1
    by_rest = sorted(range(len(counts)), key=lambda place: (counts[place] - shares[place], place))
    for place in by_rest[: LONGEST_CYCLE - sum(counts)]:
        counts[place] += 1
    common = gcd(*counts)
    return tuple(count // common for count in counts)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6])
