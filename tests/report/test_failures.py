"""Attempts of a run, their outcomes, and the cost of its failures."""

from __future__ import annotations

import pytest
from tests.report.made import BEGIN, event, failure, start, steps

from trainload.launching.run.journal import GIVEN_UP, Event
from trainload.report.runs.episodes import Attempt, attempts_of
from trainload.report.runs.failures import Failure, failures_of, time_spent
from trainload.report.runs.history import read_history


def read(
    events: list[Event], *, going_on: bool = False
) -> tuple[tuple[Attempt, ...], tuple[Failure, ...], dict[str, float]]:
    history = read_history(events)
    attempts = attempts_of(history, going_on=going_on)
    failures = failures_of(history, attempts)
    return attempts, failures, time_spent(history, attempts, failures)


STAGE = event(2, "stage", name="data", seconds=2.0)
FAILED_ONCE = [
    STAGE,
    start(5),
    *steps(5, range(10)),
    event(12, "checkpoint", step=6, seconds=0.5, bytes=10),
    failure(20, doing={"0": "in a step", "1": "saving"}),
    start(30, step=6),
    *steps(30, range(6, 20)),
    event(44, "end", step=20, steps=20),
]


def test_a_failure_costs_the_seconds_and_steps_until_the_run_is_where_it_was() -> None:
    attempts, (found,), _ = read(FAILED_ONCE)
    assert (found.time, found.what, found.ranks, found.doing) == (
        BEGIN + 20,
        "death",
        (1,),
        {0: "in a step", 1: "saving"},
    )
    assert (found.noticed, found.lost, found.again) == (5.0, 16.0, 4)
    assert [(each.outcome, each.step, each.done) for each in attempts] == [
        ("failed", 0, 10),
        ("ended", 6, 20),
    ]
    assert [
        (each.prepared - BEGIN, each.started - BEGIN, each.ended - BEGIN) for each in attempts
    ] == [(0, 5, 20), (20, 30, 44)]


def test_where_the_time_went_is_all_of_it() -> None:
    _, _, spent = read(FAILED_ONCE)
    assert sum(spent.values()) == 44.0
    assert {name: round(seconds, 3) for name, seconds in spent.items()} == {
        "steps": 20.0,
        "steps done again": 4.0,
        "starting": 15.0,
        "until failures were noticed": 5.0,
    }


def test_failures_without_a_step_between_them_share_what_they_cost() -> None:
    events = [
        start(0),
        *steps(0, range(5)),
        failure(8),
        failure(20),
        start(30),
        *steps(30, range(2)),
    ]
    _, found, _ = read(events, going_on=True)
    assert [(each.lost, each.again) for each in found] == [(3.0, 5), (23.0, 0)]
    assert sum(each.lost or 0 for each in found) == 31 - 5


def test_a_run_that_was_given_up_has_failed_once() -> None:
    events = [
        start(0),
        *steps(0, range(5)),
        failure(8, action=GIVEN_UP),
        event(8, "failed", error="TrainingError", message="no"),
    ]
    (attempt,), (found,), _ = read(events)
    assert (attempt.outcome, found.what, found.lost, found.again) == ("failed", "death", None, None)


def test_a_run_that_failed_and_was_resumed() -> None:
    told = event(8, "failed", error="TrainingError", message="the loss is nan")
    resumed = event(1002, "stage", name="data", seconds=2.0)
    events = [
        start(0),
        *steps(0, range(5)),
        told,
        resumed,
        start(1005, step=3),
        *steps(1005, range(3, 6)),
    ]
    attempts, (found,), spent = read(events, going_on=True)
    assert (found.what, found.message) == ("failed", "TrainingError: the loss is nan")
    assert found.action.startswith("resumed at")
    assert attempts[0].away == (BEGIN + 8, BEGIN + 1000)
    assert attempts[1].prepared == BEGIN + 1000
    assert (found.again, spent["nobody drove it"], spent["starting"]) == (2, 992.0, 5.0)


def test_a_run_whose_driver_was_killed_broke_off_where_it_was_last_heard_of() -> None:
    events = [
        start(0),
        *steps(0, range(5)),
        event(60, "stage", name="data", seconds=1.0),
        start(65, step=2),
        *steps(65, range(2, 6)),
    ]
    attempts, (found,), _ = read(events, going_on=True)
    assert [each.outcome for each in attempts] == ["broke off", "going on"]
    assert (found.time, found.what, found.again, found.lost) == (BEGIN + 5, "broke off", 3, 61.0)
    assert attempts[0].away == (BEGIN + 5, BEGIN + 59)


def test_a_run_that_is_lost_broke_off_and_one_that_goes_on_did_not() -> None:
    events = [start(0), *steps(0, range(5))]
    assert [each.what for each in read(events)[1]] == ["broke off"]
    assert read(events, going_on=True)[1] == ()


@pytest.mark.parametrize("kind", ["preemption", "resize"])
def test_going_to_other_nodes_is_no_failure(kind: str) -> None:
    moved = event(6, kind, message="elsewhere")
    attempts, failures, _ = read(
        [start(0), *steps(0, range(5)), moved, start(10, step=5), *steps(10, [5])], going_on=True
    )
    assert (attempts[0].outcome, attempts[0].away, failures) == ("moved", None, ())


def test_a_run_that_was_stopped_has_no_failure() -> None:
    events = [
        start(0),
        *steps(0, range(5)),
        event(6, "stopped", error="RunInterrupted", message="asked"),
    ]
    (attempt,), failures, _ = read(events)
    assert (attempt.outcome, failures) == ("stopped", ())


def test_a_failure_before_any_step_is_told() -> None:
    _, (found,), _ = read([event(1, "failed", error="DataError", message="no such file")])
    assert (found.what, found.lost) == ("failed", None)


def test_waiting_is_no_starting() -> None:
    events = [
        start(0),
        *steps(0, range(5)),
        failure(6),
        event(7, "waiting", message="for nodes"),
        event(37, "waiting", message="for nodes"),
    ]
    events += [
        event(47, "resize", message="2 -> 1 ranks", world=1),
        start(50),
        *steps(50, range(6)),
    ]
    _, _, spent = read(events, going_on=True)
    assert (spent["waiting for nodes or storage"], spent["starting"]) == (40.0, 4.0)


def test_nothing_that_happened_has_no_attempts() -> None:
    assert read([]) == ((), (), {})
