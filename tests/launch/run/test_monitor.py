"""Detection of a hanging run, and of the ranks that cause it."""

from __future__ import annotations

import dataclasses

import pytest

from trainload.launching.run.activity import Doing, Phase
from trainload.launching.run.monitor import Hang, Monitor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


STEP = Doing(Phase.STEP, step=7, marks=40, graph="train", issued=2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def monitor(clock: Clock) -> Monitor:
    return Monitor(2, hang_timeout=10.0, start_timeout=60.0, saving_timeout=30.0, clock=clock)


def after(monitor: Monitor, clock: Clock, seconds: float, *said: tuple[int, Doing]) -> Hang | None:
    """Return the hang, if any, after `seconds` in which some ranks report the same every second."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now += 1.0
        for rank, doing in said:
            monitor.hear(rank, doing)
    return monitor.hang()


def test_ranks_that_go_on_do_not_hang(monitor: Monitor, clock: Clock) -> None:
    for marks in range(30):
        doing = dataclasses.replace(STEP, marks=marks)
        assert after(monitor, clock, 5.0, (0, doing), (1, doing)) is None


def test_a_rank_that_says_nothing_more_hangs_after_the_timeout(
    monitor: Monitor, clock: Clock
) -> None:
    assert after(monitor, clock, 1.0, (0, STEP), (1, STEP)) is None
    assert after(monitor, clock, 9.0, (0, STEP)) is None
    hang = after(monitor, clock, 2.0, (0, STEP))
    assert hang is not None
    assert hang.ranks == (1,)
    assert "no heartbeat from rank 1" in hang.why


def test_the_rank_that_came_least_far_keeps_the_others_waiting(
    monitor: Monitor, clock: Clock
) -> None:
    behind = dataclasses.replace(STEP, issued=1)
    hang = after(monitor, clock, 12.0, (0, STEP), (1, behind))
    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.why == "rank 1 made no progress, and the others wait"
    assert hang.doing == {0: STEP, 1: behind}


def test_an_earlier_step_is_less_far_whatever_was_done_in_it(
    monitor: Monitor, clock: Clock
) -> None:
    hang = after(monitor, clock, 12.0, (0, STEP), (1, dataclasses.replace(STEP, step=6, issued=9)))
    assert hang is not None
    assert hang.ranks == (1,)


def test_while_one_rank_moves_the_others_wait_rightly(monitor: Monitor, clock: Clock) -> None:
    for issued in range(20):
        assert (
            after(
                monitor,
                clock,
                3.0,
                (0, STEP),
                (1, dataclasses.replace(STEP, marks=1, issued=issued)),
            )
            is None
        )


def test_ranks_that_stand_in_the_same_place_are_all_named(monitor: Monitor, clock: Clock) -> None:
    hang = after(monitor, clock, 12.0, (0, STEP), (1, STEP))
    assert hang is not None
    assert hang.ranks == (0, 1)
    assert "ranks 0, 1 wait in the same place" in hang.why


def test_before_the_first_step_there_is_more_time(monitor: Monitor, clock: Clock) -> None:
    starting = Doing()
    assert after(monitor, clock, 58.0, (0, starting), (1, starting)) is None
    assert after(monitor, clock, 4.0, (0, starting), (1, starting)) is not None


def test_a_rank_that_waits_for_storage_has_more_time_and_so_have_those_that_wait_for_it(
    monitor: Monitor, clock: Clock
) -> None:
    saving = dataclasses.replace(STEP, phase=Phase.SAVING)
    assert after(monitor, clock, 28.0, (0, saving), (1, STEP)) is None
    assert after(monitor, clock, 4.0, (0, saving), (1, STEP)) is not None


def test_a_report_that_is_old_counts_from_when_it_was_made(monitor: Monitor, clock: Clock) -> None:
    monitor.hear(0, STEP)
    monitor.hear(1, STEP, age=11.0)
    hang = monitor.hang()
    assert hang is not None
    assert hang.ranks == (1,)


def test_nobody_hangs_before_anybody_was_heard_of(monitor: Monitor, clock: Clock) -> None:
    assert after(monitor, clock, 1000.0) is None


def test_a_rank_that_never_spoke_keeps_the_others_waiting(clock: Clock) -> None:
    monitor = Monitor(4, hang_timeout=10.0, start_timeout=60.0, saving_timeout=30.0, clock=clock)
    starting = Doing()
    assert after(monitor, clock, 58.0, (0, starting), (1, starting), (3, starting)) is None
    hang = after(monitor, clock, 4.0, (0, starting), (1, starting), (3, starting))
    assert hang is not None
    assert hang.ranks == (2,)
    assert hang.why == "rank 2 never reported, and the others wait"
    assert 60.0 < hang.seconds <= 62.0
