"""GPU benchmark, run at the size that it has without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RUNS = "trainload cold,trainload warm,eager"
BF16_TOLERANCE = 0.01
"""Relative tolerance over 50 steps.

In bfloat16, a whole batch and two halves differ by 1e-3 after a few steps, in eager mode too.
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Results of the script's only case."""
    folder = tmp_path_factory.mktemp("gpu")
    out = folder / "gpu.json"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "TRAINLOAD_STATE_DIR": str(folder / "state"),
    }
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--size",
        "tiny",
        "--only",
        RUNS,
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: Mapping[str, Any] = json.loads(out.read_text())["cases"]["tiny"]
    return found


def test_every_matrix_product_of_the_step_graph_is_bfloat16(case: Mapping[str, Any]) -> None:
    assert set(case["graph"]["matmuls"]) == {"bfloat16"}
    assert case["graph"]["matmuls"]["bfloat16"] > 0


def test_no_tensor_is_left_on_another_device(case: Mapping[str, Any]) -> None:
    assert case["graph"]["tensors_on_another_device"] == 0


def test_losses_are_close_to_eagers(case: Mapping[str, Any]) -> None:
    assert 0 < case["loss_difference"]["trainload cold"] < BF16_TOLERANCE


def test_a_warm_start_has_the_losses_of_a_cold_one(case: Mapping[str, Any]) -> None:
    runs = case["runs"]
    assert runs["trainload warm"]["losses"] == runs["trainload cold"]["losses"]


def test_a_warm_start_compiles_nothing(case: Mapping[str, Any]) -> None:
    assert case["runs"]["trainload cold"]["stages"]["compile train.only"] > 0
    assert case["runs"]["trainload warm"]["stages"] == {}


def test_the_model_learns(case: Mapping[str, Any]) -> None:
    losses = case["runs"]["trainload cold"]["losses"]
    assert losses[-1] < 0.6 * losses[0]
