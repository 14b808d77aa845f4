"""What a person sees of a run."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainload import view
from trainload.sharding.plan import Cluster


@dataclass(frozen=True)
class Happening:
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **more: Any) -> Happening:
    return Happening("step", {"step": number, "steps": 100, "loss": 1.5, "tokens_per_second": 1234.5, **more})


def shown(*events: Happening, terminal: bool = False, seconds_apart: float = 0.0) -> str:
    out, clock = io.StringIO(), Clock()
    with view.RunView(Console(file=out, force_terminal=terminal, width=120), clock) as report:
        for event in events:
            report(event)
            clock.now += seconds_apart
    return out.getvalue()


def test_a_step_is_a_line_with_loss_and_throughput() -> None:
    assert shown(step(0, seconds_left=75.0)) == "step 1/100  loss 1.5000  1,234 tokens/s  1m15s left\n"


def test_rows_are_shown_where_tokens_are_not_known() -> None:
    assert "12 rows/s" in shown(Happening("step", {"step": 0, "loss": 1.0, "rows_per_second": 12.0}))


def test_metrics_are_shown() -> None:
    assert "accuracy 0.2500" in shown(step(0, metrics={"accuracy": 0.25}))


def test_steps_in_quick_succession_are_not_all_lines() -> None:
    lines = shown(*(step(n) for n in range(50))).splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "50/100"]


def test_steps_far_apart_are_all_lines() -> None:
    assert len(shown(step(0), step(1), step(2), seconds_apart=view.PLAIN_INTERVAL).splitlines()) == 3


def test_an_evaluation_is_a_line_with_its_step() -> None:
    assert shown(Happening("eval", {"step": 20, "loss": 2.0})) == "eval at step 20:  loss 2.0000\n"


def test_square_brackets_are_not_taken_for_markup() -> None:
    assert "shape [bold] differs" in shown(Happening("warning", {"message": "shape [bold] differs"}))


def test_a_terminal_has_a_bar_with_loss_and_time_left() -> None:
    text = shown(step(41), terminal=True)
    assert "42/100" in text
    assert "loss 1.5000" in text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (75, "1m15s"), (3720, "1h02m")])
def test_durations(seconds: float, text: str) -> None:
    assert view.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**52, "4096.0 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert view.size(count) == text


def test_records_paths_and_odd_numbers_have_a_json_form() -> None:
    record = Happening("end", {"path": Path("a/b"), "cluster": Cluster(nodes=2), "loss": float("nan"), "rows": (1, 2)})
    expected = {"path": "a/b", "cluster": {"nodes": 2, "devices_per_node": 1, "device": "cpu"}, "loss": None, "rows": [1, 2]}
    assert json.loads(view.dump_json(record)) == {"kind": "end", "data": expected}


def test_what_has_no_json_form_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a object has no JSON form"):
        view.as_json({"x": object()})


def test_a_failure_says_what_each_rank_did() -> None:
    data = {"message": "rank 1 died: killed", "action": "it starts again", "doing": {"0": "saving at step 3", "1": "in a step at step 3"}}
    assert shown(Happening("failure", {**data, "ranks": [1], "nodes": [], "attempt": 1, "what": "death"})).splitlines() == [
        "failure: rank 1 died: killed; it starts again",
        "  rank 0: saving at step 3",
        "  rank 1: in a step at step 3",
    ]
