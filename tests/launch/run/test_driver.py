"""A run has one driver."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.launch.forked import talking
from tests.launch.run.test_state import ended_process, state_of
from tests.waiting import wait_until

from trainload.core.errors import StorageError
from trainload.core.storage import lease
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.run import driver
from trainload.launching.run.driver import CheckDriver, check_no_driver, driving
from trainload.launching.run.run_state import STATE_FILE, Summary, read_state, write_state


def drive(run_dir: Path) -> None:
    """Drive a run until standard input ends; print "drives", or the error."""
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
    with pytest.raises(
        StorageError, match=r"the run is already being driven.*process 77 on another-host"
    ):
        check_no_driver(tmp_path)


def test_a_run_whose_driver_was_killed_is_resumed_at_once(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(state_of(ended_process()).model_dump_json())
    check_no_driver(tmp_path)


def test_of_several_that_begin_at_once_one_drives(tmp_path: Path) -> None:
    with ExitStack() as stack:
        several = [stack.enter_context(talking(drive, tmp_path)) for _ in range(4)]
        assert [each.hear() for each in several] == ["here"] * 4
        said = sorted(each.hear() for each in several)
        for each in several:
            each.end_input()
            assert each.hear_all() == []
    assert [line.partition("(")[0] for line in said] == [
        f"{tmp_path}: the run is already being driven "
    ] * 3 + ["drives"]


def test_a_run_whose_driver_holds_its_lease_is_not_resumed(tmp_path: Path) -> None:
    with talking(drive, tmp_path) as child:
        assert [child.hear(), child.hear()] == ["here", "drives"]
        with pytest.raises(
            StorageError, match=r"the run is already being driven.*its driver is .*, process [0-9]+"
        ):
            check_no_driver(tmp_path)
        child.end_input()
        assert child.hear_all() == []
    check_no_driver(tmp_path)


def check_for_a_minute(check_driver: CheckDriver) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        check_driver()
        time.sleep(0.05)


def test_a_driver_that_was_replaced_notices(tmp_path: Path) -> None:
    with driving(tmp_path) as check_driver:
        check_driver()
        newer = tmp_path / "driver/leases/00000002.json"
        newer.write_bytes((tmp_path / "driver/leases/00000001.json").read_bytes())
        with pytest.raises(
            LeaseLostError,
            match=r"another process has taken lease 2.*Another process is driving the run",
        ):
            check_for_a_minute(check_driver)


def test_a_driver_whose_storage_failed_for_long_still_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driving(tmp_path) as check_driver:
        monkeypatch.setattr(lease, "_SURE", -1.0)  # as if not renewed for too long
        check_driver()
        check_driver()


def test_a_driver_does_not_wait_for_storage_that_does_not_respond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    with driving(tmp_path) as check_driver:
        with monkeypatch.context() as patch:
            patch.setattr(lease, "_SURE", -1.0)
            patch.setattr(FolderFiles, "names", lambda self, folder: goes_on.wait())
            threads = [threading.Thread(target=check_driver) for _ in range(20)]
            for each in threads:
                each.start()
            wait_until(lambda: not any(each.is_alive() for each in threads))
        goes_on.set()


def test_a_driver_that_was_paused_looks_before_it_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driving(tmp_path) as check_driver:
        newer = tmp_path / "driver/leases/00000002.json"
        newer.write_bytes((tmp_path / "driver/leases/00000001.json").read_bytes())
        now = lease._seconds
        monkeypatch.setattr(lease, "_seconds", lambda: now() + 60.0)
        with pytest.raises(LeaseLostError, match="another process has taken lease 2"):
            check_driver()


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


def test_storage_that_takes_nothing_is_left_to_who_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(driver, "write_state", full)
    monkeypatch.setattr("trainload.core.storage.folder_files.create_file", full)
    with driving(tmp_path) as check_driver:
        check_driver()
        assert read_state(tmp_path) is None
