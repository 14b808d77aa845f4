"""Law 7: nothing half-written is ever visible, wherever its writer is killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.laws.killed import packages, runs
from tests.laws.runs import curve
from tests.ranks import ran

from trainload.packaging.package import Package, open_package

STEPS = 6


def killed(act: Callable[..., None], folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """Run a function of `killed.py` with a random seed, which is printed.

    Return its reports on its children.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    status, said = ran(act, folder, seed, *arguments, cwd=folder)
    assert status == 0, said
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def goes_forward(reports: list[dict[str, Any]]) -> bool:
    """Return True if no kill has cost a run its newest checkpoint."""
    newest: dict[str, str] = {}
    for report in reports:
        step = max((name for name in report["visible"] if name.startswith("step-")), default="")
        if step < newest.get(report["run"], ""):
            return False
        newest[report["run"]] = step
    return True


@pytest.mark.parametrize("children", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_packages_are_visible_whole_or_not_at_all(
    packaged: Package, tmp_path: Path, children: int
) -> None:
    reports = killed(packages, tmp_path, packaged.path, children)
    assert sum(report["killed"] for report in reports) >= children // 2
    assert [report for report in reports if not all(report["visible"].values())] == []
    assert {len(report["visible"]) for report in reports} >= {0, 1}


def test_checkpoints_runs_and_results_are_visible_whole_or_not_at_all(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    reports = killed(runs, tmp_path, tiny.path, tiny_data, STEPS)
    # on a busy machine a run may end before it is killed
    assert sum(report["killed"] for report in reports) >= 8
    assert [report for report in reports if not all(report["visible"].values())] == []
    assert goes_forward(reports)
    done = [
        tmp_path / f"run{number}"
        for number in range(sum(not report["killed"] for report in reports))
    ]
    assert done
    for run in done:
        assert curve(run) == curve(tmp_path / "whole")
        assert (
            open_package(run.with_suffix(".tl")).digest
            == open_package(tmp_path / "whole.tl").digest
        )
