"""A run whose checkpoints are gone does not begin again by itself, whatever runs it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.launch.commands import TORCHRUN

import trainload
from trainload.capture.errors import CheckpointError
from trainload.launch.checkpoints.index import CHECKPOINTS
from trainload.launch.journal import read_events
from trainload.packaging.read import Package
from trainload.running import prepare


def starts(run_dir: Path) -> int:
    return sum(event.kind == "start" for event in read_events(run_dir))


def test_it_is_refused_in_process(gpt: Package, gpt_data: Path, tmp_path: Path) -> None:
    plan = trainload.plan(gpt, trainload.Cluster(), "single")
    trainload.launch(gpt, plan, gpt_data, run_dir=tmp_path / "run", steps=2, compile=False, backend="local")
    shutil.rmtree(tmp_path / "run" / CHECKPOINTS)
    with pytest.raises(CheckpointError, match=r"none of the run's checkpoints can be used \(got none is there\)"):
        trainload.resume(tmp_path / "run", backend="local")
    assert starts(tmp_path / "run") == 1


def test_a_run_that_never_had_one_begins_again(gpt: Package, gpt_data: Path, tmp_path: Path) -> None:
    plan = trainload.plan(gpt, trainload.Cluster(), "single")
    prepare(gpt, plan, gpt_data, run_dir=tmp_path / "run", steps=2, compile=False, backend="local")
    assert trainload.resume(tmp_path / "run", backend="local").steps == 2


@pytest.mark.timeout(400)
def test_it_is_refused_under_torchrun(gpt: Package, gpt_data: Path, tmp_path: Path) -> None:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [*TORCHRUN, *map(str, arguments), "--backend", "torchrun"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    first = run("launch", gpt.path, "--data", gpt_data, "--steps", "2", "--run-dir", "run", "--no-compile")
    assert first.returncode == 0, first.stderr
    shutil.rmtree(tmp_path / "run" / CHECKPOINTS)
    second = run("resume", "run")
    assert second.returncode != 0
    assert "none of the run's checkpoints can be used" in second.stderr
    assert starts(tmp_path / "run") == 1
