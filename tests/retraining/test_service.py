"""The tick loop never repeats or reorders ticks, whatever clocks, ticks and machines do."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.forked import Talk, talking

from trainload.core.errors import (
    ClusterError,
    DataError,
    RequestError,
    RunInterrupted,
    StorageError,
    TrainingError,
)
from trainload.retraining.service import Missed, serve
from trainload.retraining.ticks.tick_times import Every

HOUR = timedelta(hours=1)
START = datetime(2026, 1, 1, 0, 30, tzinfo=UTC)
HOURLY = Every(HOUR)


class Clock:
    """Clock that advances during waits. `jumps`: number of the wait -> additional change."""

    def __init__(
        self, start: datetime = START, jumps: dict[int, timedelta] | None = None, end: int = 10_000
    ) -> None:
        self.time, self.jumps, self.end, self.waits = start, jumps or {}, end, 0

    def now(self) -> datetime:
        return self.time

    def wait(self, seconds: float) -> bool:
        self.waits += 1
        self.time += timedelta(seconds=seconds) + self.jumps.pop(self.waits, timedelta())
        return self.waits >= self.end


def served(
    clock: Clock,
    ticks: int,
    missed: Missed = "once",
    last: datetime | None = None,
    tick: Any = None,
    said: list[str] | None = None,
) -> list[datetime]:
    """Run a loop and return the times of its ticks."""
    found: list[datetime] = []

    def one(when: datetime) -> None:
        found.append(when)
        if tick is not None:
            tick(when)

    serve(
        HOURLY,
        missed,
        one,
        lambda: last,
        on_event=(said if said is not None else []).append,
        clock=clock,
        ticks=ticks,
    )
    return found


def hour(number: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + number * HOUR


def test_ticks_are_run_when_they_are_due() -> None:
    assert served(Clock(), 3, last=hour(0)) == [hour(1), hour(2), hour(3)]


def test_a_line_that_is_new_begins_with_the_last_time_that_was_due() -> None:
    assert served(Clock(), 2) == [hour(0), hour(1)]


def test_or_with_the_next_where_missed_ones_are_skipped() -> None:
    assert served(Clock(), 1, "skip") == [hour(1)]


def test_of_those_that_were_missed_the_last_one_is_run() -> None:
    assert served(Clock(hour(9) + HOUR / 2), 2, last=hour(3)) == [hour(9), hour(10)]


def test_or_none() -> None:
    assert served(Clock(hour(9) + HOUR / 2), 1, "skip", last=hour(3)) == [hour(10)]


def test_one_that_comes_a_moment_late_was_not_missed() -> None:
    assert served(Clock(hour(4) + timedelta(seconds=90)), 1, "skip", last=hour(3)) == [hour(4)]


def test_a_tick_that_takes_longer_than_the_time_between_costs_those_that_passed() -> None:
    clock = Clock()

    def long(_when: datetime) -> None:
        clock.time += 2.5 * HOUR

    assert served(clock, 3, last=hour(0), tick=long) == [hour(1), hour(3), hour(6)]


def test_a_machine_that_slept_notices_it_within_a_minute() -> None:
    clock = Clock(jumps={5: 5 * HOUR})
    assert served(clock, 1, last=hour(0)) == [hour(5)]
    assert clock.waits <= 6


def test_a_clock_that_goes_back_runs_nothing_again() -> None:
    clock = Clock()

    def back(when: datetime) -> None:
        if when == hour(2):
            clock.time -= 3 * HOUR

    assert served(clock, 3, last=hour(0), tick=back) == [hour(1), hour(2), hour(3)]


@pytest.mark.parametrize(
    "error",
    [
        StorageError("away", where="s3://bucket"),
        ClusterError("full"),
        DataError("gone"),
        TrainingError("dead"),
    ],
)
def test_a_tick_that_fails_of_what_may_pass_is_tried_again_with_longer_and_longer_pauses(
    error: Exception,
) -> None:
    clock = Clock()
    said: list[str] = []
    tried: list[datetime] = []

    def tick(_: datetime) -> None:
        tried.append(clock.now())
        if len(tried) < 4:
            raise error

    assert served(clock, 2, last=hour(0), tick=tick, said=said) == [hour(1)] * 4 + [hour(2)]
    assert [round((later - earlier).total_seconds()) for earlier, later in pairwise(tried[:4])] == [
        60,
        120,
        240,
    ]
    assert sum("; retrying in" in text for text in said) == 3


def test_it_is_not_tried_again_when_the_next_one_is_due() -> None:
    def tick(when: datetime) -> None:
        if when == hour(1):
            raise StorageError("away", where="s3://bucket")

    found = served(Clock(), 2, last=hour(0), tick=tick)
    assert found == [hour(1)] * (len(found) - 1) + [hour(2)]
    assert 5 <= len(found) <= 8


@pytest.mark.parametrize(
    "error", [RequestError("no such metric", where="gate.require"), RunInterrupted("stopped")]
)
def test_what_does_not_pass_is_not_tried_again(error: Exception) -> None:
    def tick(when: datetime) -> None:
        if when == hour(1):
            raise error

    said: list[str] = []
    assert served(Clock(), 2, last=hour(0), tick=tick, said=said) == [hour(1), hour(2)]
    assert f"tick 2026-01-01T01:00:00Z failed: {error}" in said


def test_a_store_that_cannot_be_asked_for_longer_than_a_period_does_not_end_the_loop() -> None:
    found: list[datetime] = []
    said: list[str] = []
    clock = Clock()

    def last_done() -> datetime:
        if found and clock.now() < hour(4):
            raise StorageError("away", where="s3://bucket")
        return hour(0)

    def tick(when: datetime) -> None:
        found.append(when)
        if clock.now() < hour(4):
            raise StorageError("away", where="s3://bucket")

    serve(Every(HOUR), "once", tick, last_done, on_event=said.append, clock=clock, ticks=4)
    assert (found[0], found[-1]) == (hour(1), hour(4))
    assert any(text.startswith("the ticks that have run cannot be read: ") for text in said)


def test_who_asks_a_loop_to_end_that_waits_to_try_again_need_not_wait_for_it() -> None:
    def tick(_: datetime) -> None:
        raise StorageError("away", where="s3://bucket")

    assert served(Clock(hour(1), end=1), 5, last=hour(0), tick=tick) == [hour(1)]


def test_what_another_scheduler_has_run_is_not_run_again() -> None:
    found: list[datetime] = []
    serve(
        HOURLY,
        "once",
        found.append,
        lambda: hour(4),
        on_event=list[str]().append,
        clock=Clock(),
        ticks=1,
    )
    assert found == [hour(5)]


@given(
    jumps=st.dictionaries(
        st.integers(1, 200),
        st.integers(-300, 300).map(lambda minutes: timedelta(minutes=minutes)),
        max_size=8,
    ),
    lasts=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    missed=st.sampled_from(["once", "skip"]),
)
def test_each_time_is_run_once_at_most_in_order_and_none_that_is_not_scheduled(
    jumps: dict[int, timedelta], lasts: list[int], missed: Missed
) -> None:
    clock = Clock(jumps=dict(jumps), end=800)

    def last(when: datetime) -> None:
        clock.time += timedelta(minutes=lasts[when.hour % len(lasts)])

    found = served(clock, 12, missed, tick=last)
    assert found == sorted(set(found))
    assert all(HOURLY.last_until(when) == when for when in found)


def obedient_tick(_: datetime) -> None:
    """Run a tick that ends on request."""
    print("begun", flush=True)
    sys.stdin.readline()
    print("done", flush=True)


def serve_apart(period: timedelta, missed: Missed, *, loud: bool) -> None:
    """Run a loop in a process of its own. `loud`: print its messages, too."""

    def say(text: str) -> None:
        if loud:
            print(text, flush=True)

    print(serve(Every(period), missed, obedient_tick, lambda: None, on_event=say), flush=True)


def served_apart(*, ignored: Sequence[int] = ()) -> AbstractContextManager[Talk]:
    """Start a loop whose ticks are due every second."""
    return talking(partial(serve_apart, loud=False), timedelta(seconds=1), "once", ignored=ignored)


def test_sigterm_ends_the_loop_after_the_tick_that_is_under_way() -> None:
    with served_apart() as child:
        assert child.hear() == "begun"
        child.send_signal(signal.SIGTERM)
        child.say("")
        assert child.hear_all() == ["done", "1"]
        assert child.process.exitcode == 0


def test_another_one_ends_it_at_once() -> None:
    with served_apart() as child:
        assert child.hear() == "begun"
        while child.process.is_alive():  # two signals that arrive together are one
            child.send_signal(signal.SIGTERM)
            child.process.join(0.2)
        assert child.process.exitcode == -signal.SIGTERM


def test_a_loop_that_waits_ends_at_once() -> None:
    with talking(partial(serve_apart, loud=True), timedelta(days=9), "skip") as child:
        assert child.hear().startswith("the next tick is due at")
        child.send_signal(signal.SIGINT)
        assert child.hear_all() == ["0"]


def test_what_a_shell_has_it_ignore_is_ignored() -> None:
    with served_apart(ignored=[signal.SIGINT]) as child:
        assert child.hear() == "begun"
        child.send_signal(signal.SIGINT)
        child.say("")
        assert [child.hear() for _ in range(2)] == ["done", "begun"]
        child.send_signal(signal.SIGTERM)
        child.say("")
        assert child.hear_all() == ["done", "2"]
