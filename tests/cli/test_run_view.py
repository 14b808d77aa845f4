"""Progress of a run on the terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.ranks import ran
from tests.waiting import wait_until

from trainload.cli.view import run_progress as run_view
from trainload.launching.run.activity import Doing, Phase
from trainload.launching.run.journal import Event
from trainload.launching.run.run_state import RankSeen, Summary, write_state

START = Event("start", {"step": 0, "steps": 100, "world": 2, "strategy": "zero1"})


class Clock:
    """Clock that advances only when it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **more: Any) -> Event:
    return Event(
        "step",
        {
            "step": number,
            "steps": 100,
            "loss": 1.5,
            "gradient_norm": 1.0,
            "seconds": 0.1,
            "tokens_per_second": 1234.5,
            **more,
        },
    )


def shown(*events: Event, terminal: bool = False, seconds_apart: float = 0.0) -> str:
    out, clock = io.StringIO(), Clock()
    with run_view.RunView(
        Console(file=out, force_terminal=terminal, width=120), clock=clock
    ) as report:
        for event in events:
            report(event)
            clock.now += seconds_apart
    return out.getvalue()


class Closed(io.StringIO):
    """A terminal that is closed after its first line."""

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_outlives_its_terminal(terminal: bool) -> None:
    out, told = Closed(), []
    with run_view.RunView(
        Console(file=out, force_terminal=terminal, width=120), clock=Clock()
    ) as report:
        for event in (
            START,
            Event("stage", {"name": "data"}),
            Event("stage", {"name": "compile"}),
            step(0),
        ):
            report(event)
            told.append(event.kind)
    assert told == ["start", "stage", "stage", "step"]


def report_to_nobody() -> None:
    """Report a run to standard error after its reader has closed it."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 2)
    os.close(write)
    with run_view.RunView(Console(stderr=True)) as report:
        for _ in range(1000):
            report(Event("stage", {"name": "data"}))
    sys.stderr.flush()  # an interpreter flushes at exit, and would fail if anything were left


def test_a_run_outlives_who_reads_its_lines(tmp_path: Path) -> None:
    status, told = ran(report_to_nobody, cwd=tmp_path)
    assert status == 0, told


def test_a_step_is_a_line_with_loss_and_throughput() -> None:
    assert (
        shown(step(0, seconds_left=75.0)) == "step 1/100  loss 1.5000  1,234 tokens/s  1m15s left\n"
    )


def test_rows_are_shown_where_tokens_are_not_known() -> None:
    assert "12 rows/s" in shown(Event("step", {"step": 0, "loss": 1.0, "rows_per_second": 12.0}))


def test_metrics_are_shown() -> None:
    assert "accuracy 0.2500" in shown(step(0, metrics={"accuracy": 0.25}))


def test_steps_in_quick_succession_are_not_all_lines() -> None:
    lines = shown(*(step(n) for n in range(50))).splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "50/100"]


def test_steps_far_apart_are_all_lines() -> None:
    assert (
        len(shown(step(0), step(1), step(2), seconds_apart=run_view.PLAIN_INTERVAL).splitlines())
        == 3
    )


def test_an_evaluation_is_a_line_with_its_step() -> None:
    assert shown(Event("eval", {"step": 20, "loss": 2.0})) == "eval at step 20:  loss 2.0000\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_that_is_longer_than_the_console_stays_whole(terminal: bool) -> None:
    text = "word " * 60
    assert f"warning: {text}".strip() in shown(
        Event("warning", {"message": text}), terminal=terminal
    )


def test_square_brackets_are_not_taken_for_markup() -> None:
    assert "shape [bold] differs" in shown(Event("warning", {"message": "shape [bold] differs"}))


def panel(*events: Event, run_dir: Path | None = None) -> str:
    made = run_view.Panel(run_dir)
    for event in events:
        made.take(event)
    return drawn(made)


def drawn(made: run_view.Panel) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(made.shown())
    return out.getvalue()


def test_a_terminal_has_a_panel_below_what_happens() -> None:
    text = shown(START, step(41), Event("warning", {"message": "look here"}), terminal=True)
    assert "42/100" in text
    assert "1.5000" in text
    assert text.index("look here") < text.rindex("42/100")


def test_a_line_above_the_panel_does_not_change_how_the_panel_looks() -> None:
    out = io.StringIO()
    with run_view.RunView(Console(file=out, force_terminal=True, width=120)) as report:
        report(START)
        report(step(0))
        wait_until(lambda: "1.5000" in out.getvalue())
        report(Event("checkpoint", {"step": 1}))
    assert "[dim]" not in out.getvalue()


def test_a_run_that_has_not_begun_says_that_it_starts() -> None:
    assert panel(Event("stage", {"name": "data", "seconds": 1.0})).startswith("starting, 0s")


def test_the_panel_has_speed_memory_and_waiting() -> None:
    text = panel(START, step(0, mfu=0.412, memory=3 << 30, data_wait=0.01))
    assert "tokens/s 1,234   MFU 41.2%   memory 3.0 GiB   waiting for data 10.0%" in text


def test_the_panel_has_the_age_of_the_checkpoint() -> None:
    assert "checkpoint step 40, 1m15s ago" in panel(
        START, Event("checkpoint", {"step": 40}, time.time() - 75)
    )


def test_the_panel_has_failures() -> None:
    text = panel(
        START, Event("failure", {"message": "rank 1 died: [red]", "action": "it starts again"})
    )
    assert "failures 1" in text
    assert "last failure rank 1 died: [red]" in text
    assert "waiting" in text


def test_the_panel_has_each_rank_as_its_driver_saw_it(tmp_path: Path) -> None:
    ranks = {
        rank: RankSeen.of(
            f"node-{rank}", 100 + rank, 1.0, Doing(Phase.STEP, 7 + rank, memory=1 << 20)
        )
        for rank in range(2)
    }
    write_state(tmp_path, 1, Summary(), ranks)
    lines = panel(START, run_dir=tmp_path).splitlines()
    assert [line.split() for line in lines if "node-" in line] == [
        ["0", "node-0", "100", "1s", "ago", "1.0", "MiB", "in", "a", "step,", "step", "8"],
        ["1", "node-1", "101", "1s", "ago", "1.0", "MiB", "in", "a", "step,", "step", "9"],
    ]


def test_of_many_ranks_those_behind_are_shown(tmp_path: Path) -> None:
    ranks = {
        rank: RankSeen.of("node", rank, 1.0, Doing(Phase.STEP, 3 if rank == 400 else 7))
        for rank in range(512)
    }
    write_state(tmp_path, 1, Summary(), ranks)
    text = panel(START, run_dir=tmp_path)
    assert "400" in text
    assert f"and {512 - run_view.MOST_RANKS} more" in text


def test_ranks_are_gone_from_the_panel_when_the_run_is_over(tmp_path: Path) -> None:
    write_state(tmp_path, 1, Summary(), {0: RankSeen.of("node-0", 100, 1.0, Doing(Phase.STEP, 7))})
    made = run_view.Panel(tmp_path)
    made.take(START)
    made.over = True
    assert "node-0" not in drawn(made)


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([1.0, 1.0], "▁▁"),
        ([1.0, float("nan"), 2.0], "▁█"),
        ([float("inf")], ""),
        ([], ""),
    ],
)
def test_curves(values: Sequence[float], bars: str) -> None:
    assert run_view.curve(values, 48) == bars


def test_a_curve_of_many_values_has_their_means() -> None:
    assert run_view.curve([0.0, 2.0, 3.0, 5.0], 2) == "▁█"


def test_a_failure_says_what_each_rank_did() -> None:
    data = {
        "message": "rank 1 died: killed",
        "action": "it starts again",
        "doing": {"0": "saving at step 3", "1": "in a step at step 3"},
    }
    assert shown(
        Event("failure", {**data, "ranks": [1], "nodes": [], "attempt": 1, "what": "death"})
    ).splitlines() == [
        "failure: rank 1 died: killed; it starts again",
        "  rank 0: saving at step 3",
        "  rank 1: in a step at step 3",
    ]
