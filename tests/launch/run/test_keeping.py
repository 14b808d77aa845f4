"""Supervision of a run whose driver is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from trainload.cli.commands import keeping
from trainload.launching.run.journal import Event
from trainload.launching.run.run_state import Summary, write_state

Drive = Callable[[int], int]
"""Driver number -> exit status of this driver, after what it does."""
Capture = pytest.CaptureFixture[str]


def summary(checkpoint: int | None, error: str = "") -> Summary:
    found = Summary()
    if checkpoint is not None:
        found.take(Event("checkpoint", {"step": checkpoint}, 1.0))
    if error:
        found.take(Event("failed", {"message": "so it is", "error": error}, 2.0))
    return found


def ended() -> Summary:
    found = summary(5)
    found.take(Event("end", {"step": 5}, 3.0))
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_PAUSE_SECONDS", 0.01)


def kept(
    monkeypatch: pytest.MonkeyPatch,
    run_dir: Path,
    drive: Drive,
    answers: Callable[[], bool] = lambda: True,
    signals: Sequence[int] = (),
) -> tuple[int, int]:
    """Supervise fake drivers; return the exit status and the number of drivers.

    `drive` is called in place of each driver, with its number. `answers` returns whether the
    cluster responds. `signals` count as forwarded to each driver.
    """
    drivers: list[int] = []

    def driven(arguments: object, run_dir: Path, asked: set[int]) -> int:
        asked.update(signals)
        drivers.append(len(drivers))
        return drive(drivers[-1])

    monkeypatch.setattr(keeping, "_drive", driven)
    return keeping.keep([], [], run_dir, answers, lambda: 0.1), len(drivers)


def test_a_run_that_ends_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5), {}, over=True)
        return 0

    assert kept(monkeypatch, tmp_path, drive) == (0, 1)


@pytest.mark.parametrize("status", [1, 2])
def test_a_run_that_fails_and_says_so_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5, "TrainingError"), {}, over=True)
        return status

    assert kept(monkeypatch, tmp_path, drive) == (status, 1)


def test_a_request_that_is_wrong_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kept(monkeypatch, tmp_path, lambda number: 2) == (2, 1)


def test_a_driver_that_is_killed_gets_a_successor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(number), {}, over=number == 6)
        return 0 if number == 6 else -9

    assert kept(monkeypatch, tmp_path, drive) == (0, 7)
    assert (
        capsys.readouterr().err.splitlines()[0]
        == "the run's driver was lost (by signal 9): starting a new one"
    )


def test_a_driver_whose_cluster_is_gone_gets_a_successor_when_it_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[bool] = []

    def answers() -> bool:
        asked.append(len(asked) >= 2)
        return asked[-1]

    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(1, "" if number else "LostClusterError"), {}, over=True)
        return 0 if number else 1

    assert kept(monkeypatch, tmp_path, drive, answers) == (0, 2)
    assert asked == [False, False, True]


def test_a_cluster_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(1), {})
        return -9

    assert kept(monkeypatch, tmp_path, drive, lambda: False) == (1, 1)


def test_drivers_that_are_lost_again_and_again_without_a_new_checkpoint_are_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5), {})
        return 247

    assert kept(monkeypatch, tmp_path, drive) == (1, 4)
    assert "was lost again (with status 247): giving up" in capsys.readouterr().err


def test_a_driver_that_dies_before_it_has_begun_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kept(monkeypatch, tmp_path, lambda number: 247) == (1, 1)
    assert "died before it started the run, with status 247" in capsys.readouterr().err


@pytest.mark.parametrize("status", [-9, 15])
def test_a_driver_that_is_killed_while_it_writes_the_result_gets_a_successor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, ended(), {}, over=True)
        return 0 if number else status

    assert kept(monkeypatch, tmp_path, drive) == (0, 2)


def test_a_run_that_has_failed_is_over_however_its_driver_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5, "TrainingError"), {}, over=True)
        return -6

    assert kept(monkeypatch, tmp_path, drive) == (-6, 1)


def test_a_driver_that_is_killed_before_it_says_anything_is_lost_whatever_one_before_it_has_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_state(tmp_path, 1, summary(5, "TrainingError"), {}, over=True)
    assert kept(monkeypatch, tmp_path, lambda number: 0 if number else -9) == (0, 2)


def test_a_request_that_is_wrong_is_not_tried_again_though_the_driver_before_was_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_state(tmp_path, 1, summary(5), {})
    assert kept(monkeypatch, tmp_path, lambda number: 2) == (2, 1)


def test_a_successor_that_cannot_begin_yet_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def drive(number: int) -> int:
        if number == 0:
            write_state(tmp_path, 1, summary(5), {})
        return (-9, 2, 0)[number]

    assert kept(monkeypatch, tmp_path, drive) == (0, 3)


@pytest.mark.parametrize(("status", "told"), [(-9, 1), (247, 247)])
def test_a_driver_that_was_asked_to_end_has_no_successor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, told: int
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5), {})
        return status

    assert kept(monkeypatch, tmp_path, drive, signals=[15]) == (told, 1)


DRIVER = """#!/bin/sh
# begins when its keeper heeds SIGTERM
caught() { sed -n 's/^SigCgt:[^0-9a-f]*//p' /proc/$PPID/status; }
while [ $((0x$(caught) & 0x4000)) = 0 ]; do sleep 0.05; done
echo begun
exec sleep 60
"""
KEEPER = """
import sys
from pathlib import Path
from trainload.cli.commands import keeping

sys.executable, asked = sys.argv[1], set()
print(keeping._drive([], Path("run"), asked), sorted(asked))
"""


@pytest.mark.parametrize(
    ("started", "sent"),
    [
        ("--default-signal=HUP", [signal.SIGHUP]),
        ("--ignore-signal=HUP", [signal.SIGHUP, signal.SIGTERM]),
    ],
    ids=["plain", "nohup"],
)
def test_a_terminal_that_is_closed_ends_the_driver_but_not_under_nohup(
    tmp_path: Path, started: str, sent: list[int]
) -> None:
    driver = tmp_path / "driver"
    driver.write_text(DRIVER)
    driver.chmod(0o700)
    command = ["env", started, sys.executable, "-c", KEEPER, str(driver)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "begun\n"
        for number in sent:  # the last one ends the driver, and thereby the supervisor
            keeper.send_signal(number)
        assert keeper.stdout.read() == f"{-signal.SIGTERM} {[int(sent[-1])]}\n"
