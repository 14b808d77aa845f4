"""Time limits of calls to storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainload.core.canonical_json import sha256_file
from trainload.core.errors import StorageError
from trainload.core.storage import bounded_files
from trainload.core.storage.bounded_files import BoundedFiles
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import Expected, OnBytes, StoreFiles


class Stuck:
    """Storage that stops to respond after the first of three blocks of a file, and goes on when it
    is told to.
    """

    url = "s3://bucket"

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def size(self, path: str) -> int:
        self.goes_on.wait()
        return 3

    def receive(self, path: str, size: int) -> Iterator[bytes]:
        yield b"1"
        self.goes_on.wait()
        yield b"23"

    def send(self, path: str, source: Path, expected: Expected, on_bytes: OnBytes) -> None:
        on_bytes(1)
        self.goes_on.wait()
        on_bytes(2)


def sent(files: StoreFiles, path: Path) -> None:
    path.write_bytes(b"123")
    files.send("file", path, Expected(3, sha256_file(path)), lambda count: None)


CALLS: dict[str, Callable[[StoreFiles, Path], Any]] = {
    "size": lambda files, path: files.size("file"),
    "receive": lambda files, path: list(files.receive("file", 3)),
    "send": sent,
}


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    storage = Stuck()
    yield storage
    storage.goes_on.set()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_go_on_is_an_error(
    name: str, stuck: Stuck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_files, "SECONDS", 0.2)
    files: Any = stuck
    with pytest.raises(StorageError, match="does not respond"):
        CALLS[name](BoundedFiles(files, 0.2), tmp_path / "file")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_goes_on_is_the_storage_s_own(name: str, tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "file").write_bytes(b"123")
    place = FolderFiles(tmp_path / "place")
    expected = CALLS[name](place, tmp_path / "file")
    assert CALLS[name](BoundedFiles(place, 60.0), tmp_path / "file") == expected


def test_a_long_file_may_take_longer_than_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Stuck):
        def receive(self, path: str, size: int) -> Iterator[bytes]:
            for _ in range(10):
                self.goes_on.wait(0.1)
                yield b"1"

        def send(self, path: str, source: Path, expected: Expected, on_bytes: OnBytes) -> None:
            for _ in range(10):
                self.goes_on.wait(0.1)
                on_bytes(1)

    monkeypatch.setattr(bounded_files, "SECONDS", 0.6)
    files: Any = Slow()
    bounded = BoundedFiles(files, 0.6)
    assert b"".join(bounded.receive("file", 10)) == b"1" * 10
    sent(bounded, tmp_path / "file")
