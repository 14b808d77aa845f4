"""Find the stretches of a sequence that repeat themselves: the layers of a model, in its list of
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LEAST_PERIOD = 12
"""Shorter repetitions are not worth a call of their own."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A stretch in which every item equals the one `period` places later.

    Attributes:
        start: index of its first item.
        period: items of one occurrence.
        matches: number of consecutive items, from `start`, that equal the one `period` places
            later; at least `period`. The stretch has `matches + period` items.
    """

    start: int
    period: int
    matches: int

    @property
    def count(self) -> int:
        """Number of whole occurrences, at least 2."""
        return 1 + self.matches // self.period

    @property
    def slack(self) -> int:
        """Number of items by which all occurrences can be moved to the right."""
        return self.matches % self.period

    @property
    def saved(self) -> int:
        """Number of items that are left out if one occurrence stands for all."""
        return (self.count - 1) * self.period


def find_repeats(items: Sequence[int], least_period: int = _LEAST_PERIOD) -> list[Repeat]:
    """Return disjoint repeats, in order: the one that saves most, then those in what is left.

    Args:
        items: numbers that are equal where the items are equal.
        least_period: smallest period.

    Example:
        >>> find_repeats([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8], least_period=3)
        [Repeat(start=1, period=3, matches=6)]
    """
    array = np.asarray(items, dtype=np.int64)
    repeats: list[Repeat] = []
    ranges = [(0, len(array))]
    while ranges:
        begin, end = ranges.pop()
        best = _best_repeat(array[begin:end], least_period)
        if best is not None:
            start = begin + best.start
            repeats.append(Repeat(start, best.period, best.matches))
            ranges += [(begin, start), (start + best.matches + best.period, end)]
    return sorted(repeats, key=lambda repeat: repeat.start)


def _best_repeat(items: npt.NDArray[np.int64], least_period: int) -> Repeat | None:
    """Return the repeat that saves most items; of equal ones that with the shortest period, and of
    those the first.
    """
    best: Repeat | None = None
    for period in range(least_period, len(items) // 2 + 1):
        equal = items[:-period] == items[period:]
        edges = np.diff(np.concatenate(([0], equal.view(np.int8), [0])))
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        if not len(starts):
            continue
        counts = (ends - starts) // period
        longest = int(np.argmax(counts))
        repeat = Repeat(int(starts[longest]), period, int(ends[longest] - starts[longest]))
        if counts[longest] and (best is None or repeat.saved > best.saved):
            best = repeat
    return best
