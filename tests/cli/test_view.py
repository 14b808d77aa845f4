"""Text and JSON forms of values that are shown to people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainload.cli.view import tables as view
from trainload.core.formatting import duration, size
from trainload.launching.run.journal import Event
from trainload.sharding.plans.plan import Cluster


@dataclass(frozen=True)
class Happening:
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (75, "1m15s"), (3720, "1h02m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_records_paths_and_odd_numbers_have_a_json_form() -> None:
    record = Happening(
        "end",
        {"path": Path("a/b"), "cluster": Cluster(nodes=2), "loss": float("nan"), "rows": (1, 2)},
    )
    expected = {
        "path": "a/b",
        "cluster": {"nodes": 2, "devices_per_node": 1, "device": "cpu"},
        "loss": None,
        "rows": [1, 2],
    }
    assert json.loads(view.dump_json(record)) == {"kind": "end", "data": expected}


def test_what_has_no_json_form_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a object has no JSON form"):
        view.as_json({"x": object()})


def test_an_evaluation_without_metrics_has_no_empty_value() -> None:
    event = Event("eval", {"step": 4, "loss": 0.5, "metrics": {}, "rows": 8}, 0.0)
    assert view.event_line(event) == "eval at step 4:  loss 0.5000  rows 8"
