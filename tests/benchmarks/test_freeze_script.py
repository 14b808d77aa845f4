"""Benchmark of the freeze, run with a Llama of a few layers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "export train",
    "export eval",
    "export predict",
    "export 4 update graphs",
    "joint trace of train",
    "eager forward+backward of train, 2 batches",
    "eager forward of eval, 2 batches",
    "eager forward of predict, 2 batches",
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Results that the script writes.

    Its exit status is ignored: in a model of this size, costs that do not grow with the model weigh
    too much.
    """
    out = tmp_path_factory.mktemp("freeze") / "freeze.json"
    command = [
        sys.executable,
        "benchmarks/freeze.py",
        "--layers",
        "4",
        "--hidden",
        "64",
        "--rounds",
        "1",
        "--depths",
        "1,2",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert out.is_file(), done.stdout + done.stderr
    found: Mapping[str, Any] = json.loads(out.read_text())
    return found


def test_every_unavoidable_part_is_listed_with_its_seconds(result: Mapping[str, Any]) -> None:
    assert set(result["parts"]) == PARTS
    assert min(result["parts"].values()) > 0


def test_the_ratio_is_that_of_the_whole_to_the_sum(result: Mapping[str, Any]) -> None:
    assert result["ratio"] == pytest.approx(
        sum(result["stages"].values()) / sum(result["parts"].values())
    )


def test_no_stage_of_the_freeze_is_left_to_the_rest(result: Mapping[str, Any]) -> None:
    assert result["stages"]["other"] < 0.1 * sum(result["stages"].values())


def test_every_graph_is_captured_and_replayed_and_the_training_one_derived(
    result: Mapping[str, Any],
) -> None:
    assert {
        f"{verb} {graph}"
        for verb in ("capture", "replay")
        for graph in ("train", "eval", "predict")
    } <= set(result["stages"])
    assert [stage for stage in result["stages"] if stage.startswith("derive")] == ["derive train"]


def test_the_package_is_opened_verified_and_planned(result: Mapping[str, Any]) -> None:
    assert {"trainload.open", "verify", "plan, ZeRO-3 on 8 workers"} <= set(result["later"])


def test_deeper_models_are_frozen_too(result: Mapping[str, Any]) -> None:
    assert list(result["depths"]) == ["1", "2"]
    assert list(result["seconds_per_layer"]) == ["2"]
