"""Find ranks that are slower than their peers, from what all of them report.

All ranks take equally long for a step, since they wait for the slowest. So what is compared is the
time of each rank's own work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainload.launching.run.activity import Doing
from trainload.sharding.plans.plan import Plan

STEPS = 20
SECONDS = 30.0
"""Least number of steps, and time, over which ranks are compared."""
LEAST_DIFFERENCE = 0.001
"""Difference per step, in seconds, below which a rank is not slower than its peers."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than its peers.

    Attributes:
        rank: the rank.
        factor: its time divided by the median of its peers.
        seconds: time of its own work per step.
        steps: number of steps over which that was measured.
    """

    rank: int
    factor: float
    seconds: float
    steps: int


class Stragglers:
    """Detector of the stragglers of an attempt.

    Args:
        ranks: ranks that do the same work.
        factor: factor from which on a rank is a straggler.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        factor: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = frozenset(ranks)
        self._factor = factor
        self._clock = clock
        self._began: float | None = None
        self._first: dict[int, Doing] = {}
        self._last: dict[int, Doing] = {}
        self._slow: set[int] = set()

    def hear(self, rank: int, doing: Doing) -> None:
        """Record what a rank reports."""
        if rank in self._ranks and doing.worked_steps:
            self._last[rank] = doing
            self._first.setdefault(rank, doing)

    def found(self) -> list[Straggler]:
        """Return the stragglers of the last steps, without those that have been returned already.

        A rank is returned again only after its excess over its peers was below half of the one that
        counts.
        """
        if len(self._ranks) < 2 or len(self._last) < len(self._ranks):
            return []
        now = self._clock()
        if self._began is None:
            self._began = now
        if now - self._began < SECONDS:
            return []
        steps = {
            rank: last.worked_steps - self._first[rank].worked_steps
            for rank, last in self._last.items()
        }
        if min(steps.values()) < STEPS:
            return []
        seconds = {
            rank: (last.worked - self._first[rank].worked) / steps[rank]
            for rank, last in self._last.items()
        }
        news = []
        for rank, own in seconds.items():
            others = statistics.median(each for other, each in seconds.items() if other != rank)
            if own - others < LEAST_DIFFERENCE or own < others * (1 + self._factor) / 2:
                self._slow.discard(rank)
            elif 0 < others * self._factor <= own and rank not in self._slow:
                self._slow.add(rank)
                news.append(Straggler(rank, own / others, own, steps[rank]))
        self._began, self._first = now, dict(self._last)
        return news


def peers_of(plan: Plan) -> tuple[int, ...]:
    """Return the ranks of a plan that do the same work; none for a pipeline or a single rank."""
    alone = plan.pipeline is not None or plan.world_size == 1
    return () if alone else tuple(range(plan.world_size))
