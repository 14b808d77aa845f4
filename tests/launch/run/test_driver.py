"""A run has one driver."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock
from tests.launch.forked import talking
from tests.launch.run.test_state import ended_process, state_of

from trainload.core.errors import StorageError
from trainload.launching.run import driver
from trainload.launching.run.driver import LOCK_FILE, check_no_driver, driving
from trainload.launching.run.run_state import STATE_FILE, Summary, read_state, write_state


def drive(run_dir: Path) -> None:
    """Drive a run until there is no more to read, and say how that went."""
    print("here", flush=True)
    try:
        with driving(run_dir):
            print("drives", flush=True)
            sys.stdin.read()
    except StorageError as error:
        print(error, flush=True)


def test_a_run_that_somebody_drives_is_not_resumed(tmp_path: Path) -> None:
    check_no_driver(tmp_path)
    (tmp_path / STATE_FILE).write_text(state_of().model_dump_json())
    with pytest.raises(StorageError, match=r"the run is going on.*process 77 on another-host"):
        check_no_driver(tmp_path)


def test_a_run_whose_driver_was_killed_is_resumed_at_once(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(state_of(ended_process()).model_dump_json())
    check_no_driver(tmp_path)


def test_of_several_that_begin_at_once_one_drives(tmp_path: Path) -> None:
    with ExitStack() as stack:
        several = [stack.enter_context(talking(drive, tmp_path)) for _ in range(4)]
        with FileLock(tmp_path / LOCK_FILE):
            assert [each.hear() for each in several] == ["here"] * 4
        said = sorted(each.hear() for each in several)
        for each in several:
            each.end_input()
            assert each.hear_all() == []
    assert [line.partition("(")[0] for line in said] == [f"{tmp_path}: the run is going on "] * 3 + ["drives"]


def test_who_drives_a_run_says_so_at_once(tmp_path: Path) -> None:
    with driving(tmp_path):
        state = read_state(tmp_path)
        assert state is not None
        assert (state.pid, state.alive, state.phase) == (os.getpid(), True, "waiting")


@pytest.mark.parametrize("before", [False, True])
def test_a_run_that_was_not_begun_is_left_as_it_was(tmp_path: Path, *, before: bool) -> None:
    if before:
        (tmp_path / STATE_FILE).write_text(state_of(ended_process(), over=True).model_dump_json())
    state = read_state(tmp_path)
    with pytest.raises(ValueError, match="no sink"), driving(tmp_path):
        raise ValueError("no sink")
    assert read_state(tmp_path) == state


def test_what_a_run_came_to_stays(tmp_path: Path) -> None:
    with driving(tmp_path):
        write_state(tmp_path, 1, Summary(phase="ended"), {}, over=True)
    state = read_state(tmp_path)
    assert state is not None
    assert (state.phase, state.over) == ("ended", True)


def test_who_holds_the_lock_for_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LOCK_SECONDS", 0.1)
    with (
        FileLock(tmp_path / LOCK_FILE),
        pytest.raises(StorageError, match=r"going on \(got another process has held driver\.lock"),
        driving(tmp_path),
    ):
        pass


def test_storage_that_takes_nothing_is_left_to_who_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(driver, "write_state", full)
    with driving(tmp_path):
        assert read_state(tmp_path) is None
