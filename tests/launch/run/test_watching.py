"""The commands for runs that are driven elsewhere, or have ended."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from tests.launch.commands import refused
from tests.launch.forked import command

import trainload
from trainload.cli import main as cli
from trainload.core.errors import StorageError
from trainload.launching.api.launch import _drive
from trainload.launching.run.journal import LOGS, log_name, read_events
from trainload.launching.run.run_spec import read_spec
from trainload.launching.run.run_state import put_state, read_state
from trainload.packaging.package import Package

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def ended(tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in a folder of runs."""
    run_dir = tmp_path_factory.mktemp("runs") / "ended"
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=run_dir,
        steps=4,
        checkpoint_every=2,
        compile=False,
        backend="local",
    )
    return run_dir


def said(capsys: Capture, *arguments: str | Path) -> str:
    assert cli.run([str(part) for part in arguments]) == 0
    return capsys.readouterr().out


def told(capsys: Capture, *arguments: str | Path) -> Any:
    return json.loads(said(capsys, *arguments, "--json"))


def test_status_of_a_run_that_has_ended(ended: Path, capsys: Capture) -> None:
    found = told(capsys, "status", ended)
    summary = found["summary"]
    assert (
        found["phase"],
        summary["step"],
        summary["steps"],
        summary["checkpoint"],
        summary["failures"],
    ) == ("ended", 4, 4, 4, 0)
    assert summary["loss"] == read_events(ended)[-4].data.get("loss", summary["loss"])
    shown = said(capsys, "status", ended)
    assert "4 of 4" in shown
    assert "step 4, " in shown


def full_disk(run_dir: Path) -> StorageError:
    """Return the error of a run whose disk fills up while it is driven."""
    try:
        with _drive(read_spec(run_dir), lambda event: None, new=False):
            raise StorageError("the disk is full")
    except StorageError as error:
        return error


def test_what_ends_a_run_that_has_made_steps_is_no_wrong_request(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = full_disk(ended)

    def fail(_: Path) -> None:
        raise error

    monkeypatch.setattr("trainload.launching.run.working_copy.read_state", fail)
    assert cli.run(["status", str(ended)]) == 1


def test_status_of_a_run_that_stopped_says_why(
    tiny: Package, tiny_data: Path, tmp_path: Path, capsys: Capture
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")

    def ask(event: trainload.Event) -> None:
        if event.kind == "step":
            (tmp_path / "run" / "stop").touch()

    with pytest.raises(trainload.RunInterrupted):
        trainload.launch(
            tiny,
            plan,
            tiny_data,
            run_dir=tmp_path / "run",
            steps=500,
            compile=False,
            backend="local",
            on_event=ask,
        )
    found = told(capsys, "status", tmp_path / "run")
    assert found["phase"] == "stopped"
    assert "Continue with: trainload resume" in found["summary"]["message"]
    assert found["summary"]["checkpoint"] == found["summary"]["step"] < 500


def test_runs_lists_them_with_the_latest_first(ended: Path, capsys: Capture) -> None:
    (entry,) = told(capsys, "runs", ended.parent)
    assert (entry["run"], entry["phase"], entry["step"]) == (str(ended), "ended", 4)
    assert "ended" in said(capsys, "runs", ended.parent)


def test_runs_of_a_folder_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    assert "there is no such folder" in refused(["runs", tmp_path / "none"], tmp_path, capsys)


def test_logs_say_what_happened(ended: Path, capsys: Capture) -> None:
    lines = said(capsys, "logs", ended).splitlines()
    assert len(lines) == len(read_events(ended))
    assert any("step 4/4  loss" in line for line in lines)
    assert said(capsys, "logs", ended, "--last", "1").splitlines() == lines[-1:]


def test_logs_as_json_are_the_journal(ended: Path, capsys: Capture) -> None:
    kinds = [
        json.loads(line)["kind"] for line in said(capsys, "logs", ended, "--json").splitlines()
    ]
    assert kinds == [event.kind for event in read_events(ended)]


def test_what_a_rank_has_printed(ended: Path, capsys: Capture) -> None:
    (ended / LOGS).mkdir()
    (ended / LOGS / log_name(1)).write_text("a line\nhalf a")
    assert said(capsys, "logs", ended, "--rank", "1") == "a line\nhalf a\n"
    assert "rank 5 has printed nothing (expected one of 0, 1)" in refused(
        ["logs", ended, "--rank", "5"], ended, capsys
    )


def test_a_rank_of_the_run_that_has_printed_nothing_is_no_error(
    ended: Path, capsys: Capture
) -> None:
    assert cli.run(["logs", str(ended), "--rank", "0"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("rank 0 has printed nothing. Runs on Ray keep all output")


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
def test_a_run_that_is_not_there(command: str, tmp_path: Path, capsys: Capture) -> None:
    assert "there is no such run" in refused([command, tmp_path / "none"], tmp_path, capsys)


def test_a_run_that_is_over_cannot_be_stopped(ended: Path, capsys: Capture) -> None:
    assert "the run is not running (got phase ended)" in refused(["stop", ended], ended, capsys)


def test_a_run_is_watched_and_stopped_from_another_process(
    tiny: Package, tiny_data: Path, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = tmp_path / "run"
    options = (
        "--data",
        tiny_data,
        "--steps",
        "100000",
        "--run-dir",
        run_dir,
        "--backend",
        "local",
        "--no-compile",
    )
    with command("launch", tiny.path, *options, cwd=tmp_path) as started:
        process = started.process
        deadline = time.monotonic() + 120
        while (
            not (run_dir / "state.json").exists()
            or told(capsys, "status", run_dir)["summary"]["step"] < 3
        ):
            assert process.is_alive(), started.err
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = told(capsys, "status", run_dir)
        assert (found["phase"], found["pid"], found["ranks"]["0"]["pid"]) == (
            "running",
            process.pid,
            process.pid,
        )
        stopped = told(capsys, "stop", run_dir)
        assert stopped["phase"] == "stopped"
        assert stopped["checkpoint"] == stopped["step"] >= 3
        assert started.wait() == 1


def test_a_lost_run_in_a_folder_is_shown_without_asking_for_its_lease(
    ended: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(run_dir: Path) -> None:
        raise AssertionError("it takes five seconds")

    shutil.copytree(ended, tmp_path / "lost")
    state = read_state(ended)
    assert state is not None
    put_state(tmp_path / "lost", state.model_copy(update={"over": False, "time": 0.0}))
    monkeypatch.setattr("trainload.launching.run.run_state.has_ended", lambda process: None)
    monkeypatch.setattr("trainload.launching.run.working_copy.other_driver", ask)
    assert told(capsys, "status", tmp_path / "lost")["phase"] == "lost"


def test_a_run_is_named_by_the_url_of_its_folder(ended: Path, capsys: Capture) -> None:
    assert told(capsys, "status", f"file://{ended}")["phase"] == "ended"
