"""Supervision of a run whose driver is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from trainload.cli.commands import keeping
from trainload.core.errors import LostClusterError, RunInterrupted, TrainingError
from trainload.launching.run.journal import Event
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_state import Summary, write_state
from trainload.launching.settings.run_settings import RunSettings

Drive = Callable[[int], int]
"""Driver number -> exit status of this driver, after what it does."""
FIRST, AGAIN = ["launch"], ["resume"]


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


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The folder of a run that no driver has begun, and that waits 0.1 s for its cluster."""
    (tmp_path / RUN_FILE).write_text('{"node_patience": 0.1}')
    return tmp_path


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
    drivers = replace_drivers(monkeypatch, drive, signals)
    return keeping.keep(FIRST, AGAIN, run_dir, answers), len(drivers)


def replace_drivers(
    monkeypatch: pytest.MonkeyPatch, drive: Drive, signals: Sequence[int] = ()
) -> list[Sequence[str]]:
    """Have `keep` call `drive` in place of its drivers. Returns the arguments of each driver."""
    drivers: list[Sequence[str]] = []

    def driven(
        arguments: Sequence[str], run_dir: Path, asked: set[int], output: BinaryIO | None
    ) -> int:
        asked.update(signals)
        drivers.append(arguments)
        if output is not None:
            output.seek(0)
            output.truncate()
            output.write(f"{len(drivers)}\n".encode())
        return drive(len(drivers) - 1)

    monkeypatch.setattr(keeping, "_drive", driven)
    return drivers


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
        == "the run's driver was lost (killed by signal 9): starting a new one"
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
    monkeypatch: pytest.MonkeyPatch, prepared: Path
) -> None:
    def drive(number: int) -> int:
        write_state(prepared, 1, summary(1), {})
        return -9

    with pytest.raises(LostClusterError, match=r"expected a response within 0\.1 s"):
        kept(monkeypatch, prepared, drive, lambda: False)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"node_patience": null}'])
def test_the_patience_of_a_run_that_cannot_be_read_is_the_default(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / RUN_FILE).write_text(content)
    assert keeping._patience(tmp_path) == RunSettings.model_fields["node_patience"].default
    assert "run.json cannot be read" in caplog.text


def test_the_successor_resumes_what_the_first_driver_has_launched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5), {}, over=number == 2)
        return 0 if number == 2 else -9

    drivers = replace_drivers(monkeypatch, drive)
    keeping.keep(FIRST, AGAIN, tmp_path, lambda: True)
    assert drivers == [FIRST, AGAIN, AGAIN]


def test_a_driver_that_dies_when_it_has_just_created_the_run_gets_a_successor(
    monkeypatch: pytest.MonkeyPatch, prepared: Path
) -> None:
    assert kept(monkeypatch, prepared, lambda number: 0 if number else -9) == (0, 2)


def test_a_driver_is_replaced_although_nothing_can_be_read_at_the_moment(
    monkeypatch: pytest.MonkeyPatch, prepared: Path
) -> None:
    def drive(number: int) -> int:
        (prepared / RUN_FILE).unlink(missing_ok=True)
        return 0 if number else -9

    assert kept(monkeypatch, prepared, drive) == (0, 2)


def test_only_what_the_last_driver_prints_is_the_result(
    monkeypatch: pytest.MonkeyPatch, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_drivers(monkeypatch, lambda number: 0 if number == 2 else -9)
    assert keeping.keep(FIRST, AGAIN, prepared, lambda: True, as_json=True) == 0
    assert capsys.readouterr().out == "3\n"


def test_a_driver_that_prints_no_result_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(keeping, "_drive", lambda *_: 1)
    with pytest.raises(TrainingError, match=r"without a result \(got exit status 1"):
        keeping.keep(FIRST, AGAIN, tmp_path, lambda: True, as_json=True)


def test_drivers_that_are_lost_again_and_again_without_a_new_checkpoint_are_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5), {})
        return 247

    drivers = replace_drivers(monkeypatch, drive)
    with pytest.raises(TrainingError, match=r"was lost again .*exit status 247"):
        keeping.keep(FIRST, AGAIN, tmp_path, lambda: True)
    assert len(drivers) == 4


def test_a_driver_that_dies_before_it_has_created_the_run_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"before it had created the run \(got exit status 247"):
        kept(monkeypatch, tmp_path, lambda number: 247)


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


def test_a_driver_that_was_asked_to_end_has_no_successor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def drive(number: int) -> int:
        write_state(tmp_path, 1, summary(5), {})
        return 247

    assert kept(monkeypatch, tmp_path, drive, signals=[15]) == (247, 1)


@pytest.mark.parametrize(
    ("has_run", "hint"), [(True, "Continue with: trainload resume"), (False, "Launch it again")]
)
def test_a_driver_that_was_ended_as_requested_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_run: bool, hint: str
) -> None:
    def drive(number: int) -> int:
        if has_run:
            write_state(tmp_path, 1, summary(5), {})
        return -15

    with pytest.raises(RunInterrupted, match=f"as requested, by SIGTERM.*{hint}"):
        kept(monkeypatch, tmp_path, drive, signals=[15])


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
print(keeping._drive([], Path("run"), asked, None), sorted(asked))
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
