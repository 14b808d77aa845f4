"""A short version of `benchmarks/faults.py`: a stuck worker and a lost node on several nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FAULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "faults.py"
HANG_TIMEOUT = 10.0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    output = tmp_path_factory.mktemp("faults") / "faults.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        FAULTS,
        "stuck",
        "node lost, elastic",
        "--output",
        output,
    ]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {row["fault"]: row for row in json.loads(output.read_text())["rows"]}


@pytest.mark.timeout(600)
def test_a_run_has_the_losses_of_an_undisturbed_one_after_each_fault(
    rows: dict[str, dict[str, Any]],
) -> None:
    assert {
        name: (row["equal"], row["checkpoints_lost"]) for name, row in rows.items()
    } == dict.fromkeys(rows, (True, 0))
    assert len(rows) == 2


def test_a_rank_that_is_stuck_is_named_within_its_time(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["worker stuck outside a collective"]
    assert row["said"].startswith("rank 1 made no progress, and the others wait")
    assert row["seconds_to_notice"] < HANG_TIMEOUT + 10.0


def test_a_node_that_is_lost_is_noticed_and_another_one_is_taken(
    rows: dict[str, dict[str, Any]],
) -> None:
    row = rows["node lost, elastic from 1 to 2"]
    assert "is gone, with rank 1" in row["said"]
    assert row["seconds_to_notice"] < 5.0
    assert row["worlds"] == [2, 1, 2]
