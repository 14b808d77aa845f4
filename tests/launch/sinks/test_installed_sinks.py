"""Sinks that other distributions provide as entry points."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.house.source import ROOT, python_blocks
from tests.launch.sinks.distributions import RECORDING, install

import trainload
from trainload.core.errors import RequestError, StorageError
from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.sinks.installed_sinks import GROUP, check_sink_libraries, installed_sinks
from trainload.packaging.package import Package

Patch = pytest.MonkeyPatch
OPTIONS: dict[str, Any] = {"steps": 3, "compile": False, "backend": "local"}


def test_our_own_sinks_are_entry_points_of_trainload() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {
        name: point.value
        for name, points in installed_sinks().items()
        for point in points
        if point.dist is not None and point.dist.name == "trainload"
    }
    assert ours == project["entry-points"][GROUP]


def test_a_run_uses_the_sink_of_another_distribution(
    tiny: Package, tiny_data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    install(monkeypatch, tmp_path / "site", "recording", RECORDING, {"recorder": "Recording"})
    run_dir = tmp_path / "run"
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    trainload.launch(tiny, plan, tiny_data, run_dir=run_dir, sinks=["recorder"], **OPTIONS)
    lines = (run_dir / "recorded.txt").read_text().splitlines()
    found = losses(read_events(run_dir))
    assert lines == [*(f"{step + 1} {loss!r}" for step, loss in enumerate(found)), "ended"]


def test_the_sink_of_the_documentation_receives_a_run(
    tiny: Package, tiny_data: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    code = python_blocks("docs/guides/trackers.md")[0]
    toml = (
        (ROOT / "docs/guides/trackers.md").read_text().partition("```toml\n")[2].partition("```")[0]
    )
    points = tomllib.loads(toml)["project"]["entry-points"][GROUP]
    sinks = {name: value.partition(":")[2] for name, value in points.items()}
    install(monkeypatch, tmp_path / "site", "json_lines", code, sinks)
    run_dir = tmp_path / "run"
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    trainload.launch(tiny, plan, tiny_data, run_dir=run_dir, sinks=["jsonl"], **OPTIONS)
    rows = [json.loads(line) for line in (run_dir / "numbers.jsonl").read_text().splitlines()]
    found = [row["loss"] for row in rows if "loss" in row]
    assert found == losses(read_events(run_dir))


@pytest.mark.slow
def test_an_installed_wheel_brings_a_sink_to_the_command_line(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "recording.py").write_text(RECORDING)
    (source / "pyproject.toml").write_text(
        f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "recording"
version = "1.0"
[project.entry-points."{GROUP}"]
recorder = "recording:Recording"
[tool.setuptools]
py-modules = ["recording"]
"""
    )
    site = tmp_path / "site"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(source)]
    subprocess.run(pip, check=True)
    run_dir = str(tmp_path / "run")
    launch = ["launch", str(tiny.path), "--data", str(tiny_data), "--run-dir", run_dir]
    launch += ["--steps", "2", "--backend", "local", "--no-compile", "--set", "sinks=recorder"]
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "trainload", *launch]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    assert read_spec(tmp_path / "run").sinks == ("recorder",)
    assert (tmp_path / "run" / "recorded.txt").read_text().splitlines()[-1] == "ended"


def test_a_sink_is_imported_only_when_a_run_uses_it(tmp_path: Path, monkeypatch: Patch) -> None:
    code = "raise SystemExit('imported')"
    install(monkeypatch, tmp_path, "unused", code, {"unused": "Sink"})
    check_sink_libraries(["tensorboard"])
    assert "unused" in installed_sinks()


def test_an_unknown_sink_is_rejected_with_the_nearest_installed_name() -> None:
    with pytest.raises(RequestError, match="tensorbord") as caught:
        check_sink_libraries(["tensorbord"])
    assert "Did you mean tensorboard?" in str(caught.value)
    assert "mlflow, opentelemetry, prometheus, tensorboard, wandb" in str(caught.value)


def test_a_launch_with_an_unknown_sink_leaves_nothing(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    run_dir = tmp_path / "run"
    with pytest.raises(RequestError, match="no sink of this name"):
        trainload.launch(tiny, plan, tiny_data, run_dir=run_dir, sinks=["recorder"], **OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_two_distributions_use_is_rejected(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("first", "second"):
        install(monkeypatch, tmp_path / name, name, RECORDING, {"recorder": "Recording"})
    with pytest.raises(RequestError, match=r"several installed distributions.*first, second"):
        check_sink_libraries(["recorder"])


def test_no_distribution_replaces_a_sink_of_ours(tmp_path: Path, monkeypatch: Patch) -> None:
    code = "raise AssertionError('imported')"
    install(monkeypatch, tmp_path, "other", code, {"tensorboard": "Sink"})
    check_sink_libraries(["tensorboard"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import missing_library", "Install what broken needs"),
        ("raise ValueError('no licence')", "cannot be imported.*broken:Sink.*no licence"),
        ("raise SystemExit('no licence')", "cannot be imported.*broken:Sink.*no licence"),
        ("Sink = 3", "cannot be made.*broken:Sink: a class, or a function.*got int"),
        ("", "cannot be imported.*broken:Sink.*has no attribute"),
    ],
)
def test_a_sink_that_cannot_be_imported_is_named_before_the_run(
    tmp_path: Path, monkeypatch: Patch, code: str, message: str
) -> None:
    install(monkeypatch, tmp_path, "broken", code, {"broken": "Sink"})
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(StorageError, match=f"(?s){message}"):
        check_sink_libraries(["broken"])
    sys.modules.pop("broken", None)


@pytest.mark.parametrize("made", ["None", "3"])
def test_a_launch_with_a_sink_that_is_none_is_rejected(
    tiny: Package, tiny_data: Path, tmp_path: Path, monkeypatch: Patch, made: str
) -> None:
    code = f"def make(run_dir):\n    return {made}"
    install(monkeypatch, tmp_path / "site", "nothing", code, {"nothing": "make"})
    monkeypatch.delitem(sys.modules, "nothing", raising=False)
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    run_dir = tmp_path / "run"
    with pytest.raises(
        StorageError, match=r"the sink nothing lacks methods.*without numbers, text"
    ):
        trainload.launch(tiny, plan, tiny_data, run_dir=run_dir, sinks=["nothing"], **OPTIONS)
    assert not run_dir.exists()
    sys.modules.pop("nothing", None)


def test_a_sink_that_is_named_twice_is_rejected() -> None:
    with pytest.raises(RequestError, match=r"a sink is named twice.*got tensorboard"):
        check_sink_libraries(["tensorboard", "tensorboard"])


def test_the_import_of_a_sink_changes_no_handler_of_signals(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nSink = dict"
    install(monkeypatch, tmp_path, "deaf", code, {"deaf": "Sink"})
    monkeypatch.delitem(sys.modules, "deaf", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    check_sink_libraries(["deaf"])
    assert signal.getsignal(signal.SIGTERM) is before
    sys.modules.pop("deaf", None)
