"""The order of a mixture's batches: the part and rows of a global batch as a pure function of the
batch's number.

The stream of global batches is divided into cycles. In each cycle every part has a fixed number of
batches, in a pseudorandom order keyed by (seed, cycle). The batches of a part are consecutive in
its own shuffled stream of rows, so that every row of the part occurs exactly once in each of its
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
"""Maximum length of a cycle in global batches. Weights that need a longer cycle are rounded."""


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Order of the global batches of a run.

    Laws: in each cycle of sum(counts) batches, part i has counts[i] batches; a single part is read
    in the same order as without a mixture.

    Attributes:
        seed: seed of the order.
        sizes: number of rows of each part.
        counts: number of global batches of each part in a cycle, each at least 1.
    """

    seed: int
    sizes: tuple[int, ...]
    counts: tuple[int, ...] = (1,)

    def part(self, number: int) -> tuple[int, int]:
        """Return the part of global batch `number`, and the number of earlier batches of that
        part.
        """
        if len(self.sizes) == 1:
            return 0, number
        length = sum(self.counts)
        cycle, place = divmod(number, length)
        order = np.repeat(np.arange(len(self.counts)), self.counts)[
            rows(_seed(self.seed, "order"), length, cycle * length, length)
        ]
        part = int(order[place])
        return part, cycle * self.counts[part] + int(np.count_nonzero(order[:place] == part))

    def rows(self, part: int, before: int, whole: int, first: int, count: int) -> Rows:
        """Return rows [first, first + count) of a global batch of `whole` rows, the `before`-th
        (0-based) of its part.
        """
        seed = self.seed if len(self.sizes) == 1 else _seed(self.seed, str(part))
        return rows(seed, self.sizes[part], before * whole + first, count)


def cycle_counts(weights: Sequence[float | int]) -> tuple[int, ...]:
    """Return the number of global batches of each part in a cycle, in proportion to the weights.

    The proportion is exact if a cycle of at most LONGEST_CYCLE batches allows it.

    Args:
        weights: positive weights, at most LONGEST_CYCLE of them.

    Returns:
        Numbers without a common divisor, each at least 1.
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
    while sum(counts) > LONGEST_CYCLE:  # raising small parts to 1 is paid for by the largest
        counts[counts.index(max(counts))] -= 1
    by_rest = sorted(range(len(counts)), key=lambda place: (counts[place] - shares[place], place))
    for place in by_rest[: LONGEST_CYCLE - sum(counts)]:
        counts[place] += 1
    common = gcd(*counts)
    return tuple(count // common for count in counts)


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6])
