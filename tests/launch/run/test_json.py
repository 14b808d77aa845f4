"""With --json, a command writes one JSON value to stdout, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch.forked import torchrun_done
from tests.launch.worker.test_bad_input import SOUND
from tests.laws.processes import rank_pids

import trainload
from trainload.cli import main as cli
from trainload.cli.view import run_progress as run_view
from trainload.launching.run.journal import Event, losses, read_events
from trainload.packaging.package import Package

Capture = pytest.CaptureFixture[str]


def said(capfd: Capture, *arguments: str | Path) -> Any:
    """Return the JSON output of a command that exits with 0.

    stdout is captured at the level of file descriptors.
    """
    capfd.readouterr()
    assert cli.run([*map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_freeze_even_where_the_job_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "printing_spec.py").write_text(f"print('hello')\n{SOUND}")
    found = said(capfd, "freeze", f"{tmp_path / 'printing_spec.py'}:job", "-o", tmp_path / "out.tl")
    assert found["digest"] == trainload.open(tmp_path / "out.tl").digest


def test_inspect(gpt: Package, capfd: Capture) -> None:
    assert said(capfd, "inspect", gpt.path)["digest"] == gpt.digest


def test_verify(gpt: Package, capfd: Capture) -> None:
    assert said(capfd, "verify", gpt.path)["problems"] == []


def test_plan(gpt: Package, capfd: Capture) -> None:
    assert (
        said(capfd, "plan", gpt.path, "--devices-per-node", "2", "--strategy", "zero1")["strategy"]
        == "zero1"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_dry_run_starts_nothing_and_leaves_nothing(
    gpt: Package, gpt_data: Path, tmp_path: Path, capfd: Capture
) -> None:
    found = said(
        capfd,
        "launch",
        gpt.path,
        "--data",
        gpt_data,
        "--run-dir",
        tmp_path / "run",
        "--workers",
        "2",
        "--dry-run",
        "--no-compile",
    )
    assert (found["workers"], found["rows"], found["digest"]) == (2, 91, gpt.digest)
    assert found["run_seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def test_launch_and_resume(tiny: Package, tiny_data: Path, tmp_path: Path, capfd: Capture) -> None:
    run_dir, alone = tmp_path / "run", ("--backend", "local")
    launched = said(
        capfd,
        "launch",
        tiny.path,
        "--data",
        tiny_data,
        "--run-dir",
        run_dir,
        "--steps",
        "3",
        "--no-compile",
        *alone,
    )
    assert launched["steps"] == 3
    assert said(capfd, "resume", run_dir, *alone)["last_loss"] == launched["last_loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(300)
def test_launch_on_ray_even_where_a_worker_dies(
    gpt: Package, gpt_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    killed: list[int] = []
    tell = run_view.RunView.__call__

    def kill(shown: run_view.RunView, event: Event) -> None:
        tell(shown, event)
        if event.kind == "step" and not killed:
            killed.extend(rank_pids(tmp_path / "run")[0][:1])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(run_view.RunView, "__call__", kill)
    options = ("--steps", "200", "--workers", "2", "--strategy", "zero1", "--no-compile")
    found = said(
        capfd, "launch", gpt.path, "--data", gpt_data, "--run-dir", tmp_path / "run", *options
    )
    assert killed
    assert found["restarts"] == 1


@pytest.mark.slow
def test_torchrun_speaks_through_rank_0_alone(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir, output = tmp_path / "run", tmp_path / "trained.tl"
    options = (
        "--run-dir",
        run_dir,
        "--output",
        output,
        "--steps",
        "4",
        "--strategy",
        "zero3",
        "--no-compile",
        "--backend",
        "torchrun",
    )
    status, out, err = torchrun_done(
        "launch", tiny.path, "--data", tiny_data, *options, "--json", cwd=tmp_path
    )
    assert status == 0, err
    found = json.loads(out)
    assert (found["steps"], found["output"]) == (4, str(output))
    assert trainload.open(output).digest == found["output_digest"]
    assert len(losses(read_events(run_dir))) == 4
