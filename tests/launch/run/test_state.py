"""The state that a run writes, and its interpretation."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainload.core.processes import this_process
from trainload.launching.run.journal import Event
from trainload.launching.run.run_state import RunState, Summary, read_state, write_state

START = Event("start", {"step": 4, "steps": 10, "world": 2, "strategy": "zero3"}, 1.0)
STEP = Event(
    "step",
    {
        "step": 4,
        "loss": 1.5,
        "gradient_norm": 0.5,
        "seconds": 0.2,
        "data_wait": 0.1,
        "seconds_left": 1.0,
    },
    2.0,
)


def summed(*events: Event) -> Summary:
    summary = Summary()
    for event in events:
        summary.take(event)
    return summary


def test_a_step_counts_as_done() -> None:
    found = summed(START, STEP)
    assert (found.step, found.steps, found.loss, found.phase, found.data_wait) == (
        5,
        10,
        1.5,
        "running",
        0.5,
    )


def test_a_run_that_starts_again_is_where_it_starts() -> None:
    assert summed(START, STEP, START).step == 4


def test_failures_are_counted_and_the_last_one_is_kept() -> None:
    failures = [
        Event("failure", {"message": message, "action": "it starts again"}, 3.0)
        for message in ("first", "second")
    ]
    found = summed(START, *failures)
    assert (found.failures, found.last_failure, found.phase, found.message) == (
        2,
        "second",
        "waiting",
        "it starts again",
    )


@pytest.mark.parametrize("kind", ["failed", "stopped"])
def test_the_last_word_says_why(kind: str) -> None:
    found = summed(START, Event(kind, {"message": "because", "error": "TrainingError"}, 3.0))
    assert (found.phase, found.message) == (kind, "because")


def test_a_run_that_goes_on_has_no_last_word() -> None:
    found = summed(
        START, Event("stopped", {"message": "because", "error": "TrainingError"}, 3.0), START
    )
    assert (found.phase, found.message) == ("running", "")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    summary = summed(START, STEP)
    write_state(tmp_path, 3, summary, {})
    state = read_state(tmp_path)
    assert state is not None
    assert (state.attempt, state.summary, state.phase, state.alive) == (3, summary, "running", True)


def test_a_loss_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    write_state(tmp_path, 1, summed(START, Event("step", {**STEP.data, "loss": math.nan}, 2.0)), {})
    state = read_state(tmp_path)
    assert state is not None
    assert state.summary.loss is None


def test_half_a_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"time":')
    assert read_state(tmp_path) is None


def state_of(process: str = "", age: float = 0.0, *, over: bool = False) -> RunState:
    """Return the state of a driver on another host; `process` identifies its process."""
    return RunState(
        time=time.time() - age,
        host="another-host",
        pid=77,
        process=process,
        attempt=1,
        over=over,
        summary=summed(START),
        ranks={},
    )


def ended_process() -> str:
    code = "from trainload.core.processes import this_process; print(this_process())"
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_driver_that_is_gone_has_lost_its_run() -> None:
    assert state_of(ended_process()).phase == "lost"


def test_a_driver_that_says_nothing_and_is_there_has_not_lost_its_run() -> None:
    assert state_of(this_process(), age=60.0).phase == "running"


def test_a_driver_elsewhere_is_gone_when_it_says_nothing_for_a_while() -> None:
    assert state_of("another-boot pid:[1] 77 1").phase == "running"
    assert state_of("another-boot pid:[1] 77 1", age=60.0).phase == "lost"


def test_a_run_that_is_over_is_not_lost() -> None:
    # the phase that its last event implies
    assert state_of(ended_process(), age=60.0, over=True).phase == "running"
