"""Storage that fails on access to a path: no request is reported, errors have messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainload.core.errors import StorageError
from trainload.launching.data.data_files import find_files
from trainload.launching.data.mixture import parts_of
from trainload.launching.run.contact import FileContact, Request, asked_by_file, clear_requests
from trainload.launching.run.journal import JOURNAL, followed, read_events, stream_events
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import check_new_run, read_spec
from trainload.launching.run.run_state import Summary

Fail = Callable[[Path], None]


@pytest.fixture(params=[errno.EIO, errno.ESTALE, errno.EACCES], ids=errno.errorcode.__getitem__)
def fail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Function that makes `stat` and `unlink` fail for all paths below a folder."""
    error = OSError(request.param, os.strerror(request.param))

    def failing(folder: Path) -> None:
        def below(path: object) -> bool:
            return isinstance(path, str | Path) and Path(path).is_relative_to(folder)

        stat, unlink = Path.stat, Path.unlink

        def no_stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
            if below(path):
                raise error
            return stat(path, follow_symlinks=follow_symlinks)

        def no_unlink(path: Path, missing_ok: bool = False) -> None:
            if below(path):
                raise error
            unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "stat", no_stat)
        monkeypatch.setattr(Path, "unlink", no_unlink)

    return failing


def test_it_asks_for_nothing(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / Request.STOP.file).touch()
    contact = FileContact(tmp_path, 1, Summary())
    assert asked_by_file(tmp_path) is Request.STOP
    fail(tmp_path)
    assert asked_by_file(tmp_path) is Request.NONE
    assert contact.asked() is Request.NONE
    contact.met(Request.CHECKPOINT)


def test_a_request_of_before_that_cannot_be_removed_is_told_of(fail: Fail, tmp_path: Path) -> None:
    fail(tmp_path)
    with pytest.raises(StorageError, match=r"cannot be removed.*Remove these files, then resume"):
        clear_requests(tmp_path)


def test_a_new_run_is_refused_in_words(fail: Fail, tmp_path: Path) -> None:
    fail(tmp_path)
    with pytest.raises(
        StorageError, match=r"run/run\.json: it cannot be read.*name another folder"
    ):
        check_new_run(tmp_path / "run")


def test_a_run_is_not_resumed_and_says_why(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_bytes(b"{}")
    fail(tmp_path)
    with pytest.raises(StorageError, match=r"run\.json: it cannot be read.*its storage responds"):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["rows.parquet", "*.parquet"])
def test_data_is_not_read_and_says_why(fail: Fail, tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.parquet").touch()
    fail(tmp_path)
    with pytest.raises(
        StorageError, match=r"parquet: the data cannot be read.*its storage responds"
    ):
        find_files(tmp_path / name, [".parquet"])


def test_a_mixture_is_not_read_and_says_why(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "mixture.json").touch()
    fail(tmp_path)
    with pytest.raises(StorageError, match=r"mixture\.json: the data cannot be read"):
        parts_of(tmp_path / "mixture.json")


@pytest.mark.parametrize("read", [read_events, lambda folder: list(stream_events(folder))])
def test_a_journal_is_not_read_and_says_why(
    fail: Fail, tmp_path: Path, read: Callable[[Path], object]
) -> None:
    (tmp_path / JOURNAL).touch()
    fail(tmp_path)
    with pytest.raises(StorageError, match=r"events\.jsonl: the journal cannot be read"):
        read(tmp_path)


def test_who_follows_a_journal_that_cannot_be_read_does_not_end_the_run(
    fail: Fail, tmp_path: Path
) -> None:
    with followed(tmp_path, lambda event: None):
        fail(tmp_path)
