"""Exit status of a manifest's job, which tells KubeRay whether to retry on another cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pytest
from tests.launch.forked import command, done
from tests.laws.runs import wait_for_step

from trainload.cli import main as cli
from trainload.cli.commands import driving, watching
from trainload.launching.run.journal import Event, read_events
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_state import Summary, write_state
from trainload.packaging.package import Package

Capture = pytest.CaptureFixture[str]
Driven = Callable[[Path], int]
STOPPED = Event("stopped", {"error": "RunInterrupted", "message": "the run was asked to stop"}, 1.0)
KILLED = Event(
    "stopped", {"error": "KeyboardInterrupt", "message": "ended at once, without a checkpoint"}, 1.0
)
DIVERGED = Event("failed", {"error": "DivergedError", "message": "the loss is nan"}, 1.0)
FAILED = Event("failed", {"error": "TrainingError", "message": "rank 0 died"}, 1.0)
LAUNCH = ("launch", "gpt.tl", "--data", "rows.npz", "--address", "auto")


def ended(event: Event) -> Driven:
    """Return a driver of an unfinished run that records this as its last event and exits with 1."""

    def drive(run_dir: Path) -> int:
        (run_dir / RUN_FILE).touch()
        write_state(run_dir, 1, Summary.of([event]), {}, over=True)
        return 1

    return drive


def driven(
    run_dir: Path, by: Driven, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[list[str]]]:
    """Drive a run. Returns the job's exit status and the commands that it ran."""
    run_dir.mkdir(exist_ok=True)
    words: list[list[str]] = []

    def inner(_group: click.Command, arguments: Sequence[str]) -> int:
        words.append(list(arguments))
        return by(run_dir)

    monkeypatch.setattr(driving, "run_group", inner)
    return cli.run(["manifest", "drive", str(run_dir), "--", *LAUNCH]), words


def test_the_first_driver_launches_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    assert driven(run_dir, ended(FAILED), monkeypatch) == (1, [list(LAUNCH)])
    assert driven(run_dir, ended(FAILED), monkeypatch) == (
        1,
        [["resume", str(run_dir), "--address", "auto"]],
    )


def test_a_run_that_somebody_stopped_asks_for_no_other_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run_dir = tmp_path / "run"
    assert driven(run_dir, ended(STOPPED), monkeypatch)[0] == 0
    assert "the run was stopped, so the job is done: submit it again to continue" in " ".join(
        capsys.readouterr().err.split()
    )
    assert driven(run_dir, ended(STOPPED), monkeypatch) == (
        0,
        [["resume", str(run_dir), "--address", "auto"]],
    )


@pytest.mark.parametrize("event", [KILLED, FAILED, DIVERGED])
def test_other_ends_are_failures_of_the_job(
    event: Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driven(tmp_path / "run", ended(event), monkeypatch)[0] == 1


def test_a_run_that_has_ended_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driven(tmp_path / "run", lambda run_dir: 0, monkeypatch)[0] == 0


def test_a_driver_that_says_nothing_has_not_stopped_because_an_earlier_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    driven(run_dir, ended(STOPPED), monkeypatch)
    assert driven(run_dir, lambda run_dir: 1, monkeypatch)[0] == 1
    assert driven(run_dir, lambda run_dir: 2, monkeypatch)[0] == 2


def evicted(run_dir: Path) -> int:
    """Act as a driver whose run is stopped by the preStop hook of the head's pod."""
    (run_dir / RUN_FILE).touch()
    write_state(run_dir, 1, Summary(), {})
    assert driving.evict.main([str(run_dir)], standalone_mode=False) is None
    assert (run_dir / "stop").exists()
    return ended(STOPPED)(run_dir)


def test_a_run_that_was_evicted_asks_for_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setattr(watching, "_wait_for_end", watching._require_state)
    assert driven(run_dir, evicted, monkeypatch)[0] == 1
    assert not (run_dir / "evicted").exists()
    assert driven(run_dir, ended(STOPPED), monkeypatch)[0] == 0


def test_a_mark_that_an_earlier_head_left_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "evicted").touch()
    assert driven(run_dir, ended(STOPPED), monkeypatch)[0] == 0


def test_a_run_that_is_over_gets_no_mark(tmp_path: Path, capsys: Capture) -> None:
    ended(STOPPED)(tmp_path)
    assert cli.run(["manifest", "evict", str(tmp_path)]) == 2
    assert "the run is not running" in capsys.readouterr().err
    assert not (tmp_path / "evicted").exists()


def test_a_run_that_has_diverged_is_not_driven_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run_dir = tmp_path / "run"
    driven(run_dir, ended(DIVERGED), monkeypatch)
    capsys.readouterr()
    assert driven(run_dir, ended(DIVERGED), monkeypatch) == (1, [])
    assert (
        "the run has diverged, and would diverge again (got the loss is nan)"
        in capsys.readouterr().err
    )


def test_a_run_that_has_gone_on_since_it_diverged_is_driven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    driven(run_dir, ended(DIVERGED), monkeypatch)
    start = Event("start", {"step": 3, "steps": 9, "world": 1, "strategy": "single"}, 2.0)
    write_state(run_dir, 1, Summary.of([DIVERGED, start]), {}, over=True)
    assert driven(run_dir, ended(FAILED), monkeypatch) == (
        1,
        [["resume", str(run_dir), "--address", "auto"]],
    )


@pytest.mark.matrix("words1-1")
@pytest.mark.parametrize(("words", "status"), [(("stop",), 0), (("manifest", "evict"), 1)])
def test_a_run_says_by_what_it_was_stopped(
    words: tuple[str, ...], status: int, tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = (
        "--data",
        tiny_data,
        "--run-dir",
        run_dir,
        "--backend",
        "local",
        "--no-compile",
        "--steps",
        "100000",
    )
    with command(
        "manifest", "drive", run_dir, "--", "launch", tiny.path, *options, cwd=tmp_path
    ) as job:
        wait_for_step(run_dir, 2, job.process.is_alive)
        stopped, _, said = done(*words, run_dir, cwd=tmp_path)
        assert stopped == 0, said
        assert job.wait() == status, job.err
    kinds = [event.kind for event in read_events(run_dir)]
    assert kinds.index("checkpoint") < kinds.index("stopped")
    assert not (run_dir / "evicted").exists()


def test_help_does_not_name_what_manifests_run(capsys: Capture) -> None:
    assert cli.run(["manifest", "--help"]) == 0
    said = capsys.readouterr().out
    assert "kuberay" in said
    assert "drive" not in said
    assert "evict" not in said
