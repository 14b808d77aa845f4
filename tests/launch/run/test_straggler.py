"""Ranks that are slower than their peers are found, and reported once."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from trainload.launching.run.activity import Activity, Doing
from trainload.launching.run.straggler import SECONDS, STEPS, Straggler, Stragglers, peers_of


class Ranks:
    """Ranks that work on steps, of which each takes a second for all of them.

    Attributes:
        steps: number of steps so far.
    """

    def __init__(self, world: int, factor: float = 1.5) -> None:
        self.now = 100.0
        self.steps = 0
        self._worked = dict.fromkeys(range(world), 0.0)
        self.watch = Stragglers(range(world), factor, lambda: self.now)

    def work(
        self, slow: Mapping[int, float] | None = None, steps: int = 2 * STEPS
    ) -> list[Straggler]:
        """Work on steps, 0.1 s each if `slow` does not say otherwise; return all stragglers."""
        found = []
        for _ in range(steps):
            self.now += max(1.0, SECONDS / STEPS)
            self.steps += 1
            for rank in self._worked:
                self._worked[rank] += (slow or {}).get(rank, 0.1)
                doing = Doing(worked_steps=self.steps, worked=self._worked[rank])
                self.watch.hear(rank, doing)
            found += self.watch.found()
        return found


def test_a_rank_that_takes_twice_as_long_is_found() -> None:
    (found,) = Ranks(4).work({2: 0.2})
    assert (found.rank, found.steps) == (2, STEPS)
    assert (found.factor, found.seconds) == pytest.approx((2.0, 0.2))


def test_of_two_ranks_the_slower_one_is_found() -> None:
    (found,) = Ranks(2).work({0: 0.3})
    assert found.rank == 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equal_ranks_are_no_stragglers(world: int) -> None:
    assert Ranks(world).work() == []


def test_a_rank_below_the_factor_is_none() -> None:
    assert Ranks(4, factor=2.5).work({2: 0.24}) == []


def test_a_rank_that_stays_slow_is_reported_once() -> None:
    assert len(Ranks(4).work({2: 0.2}, steps=6 * STEPS)) == 1


def test_a_rank_that_is_slow_again_is_reported_again() -> None:
    ranks = Ranks(4)
    found = [ranks.work({1: 0.2}), ranks.work(), ranks.work({1: 0.2})]
    assert [len(each) for each in found] == [1, 0, 1]


def test_a_rank_about_as_slow_as_the_factor_is_reported_once() -> None:
    ranks = Ranks(4)
    found = [ranks.work({1: seconds}) for seconds in (0.16, 0.14, 0.16, 0.13, 0.16)]
    assert [len(each) for each in found] == [1, 0, 0, 0, 0]


def test_a_difference_that_is_too_short_to_be_measured_is_none() -> None:
    assert Ranks(2).work({0: 0.0006, 1: 0.0002}) == []


def test_a_few_slow_steps_are_none() -> None:
    ranks = Ranks(4)
    ranks.work(steps=STEPS // 2)
    assert ranks.work({1: 0.2}, steps=2) == []
    assert ranks.work() == []


def test_ranks_are_not_compared_before_all_have_worked() -> None:
    watch = Stragglers(range(2), 1.5, lambda: 0.0)
    watch.hear(0, Doing(worked_steps=500, worked=1.0))
    watch.hear(1, Doing())
    assert watch.found() == []


def test_the_stages_of_a_pipeline_are_no_peers() -> None:
    plan: Any = SimpleNamespace(pipeline=object(), world_size=4)
    assert peers_of(plan) == ()


def test_a_rank_reports_the_time_of_its_own_work() -> None:
    activity = Activity()
    activity.worked(0.5)
    activity.worked(0.25)
    doing = activity.now()
    assert (doing.worked_steps, doing.worked) == (2, 0.75)
