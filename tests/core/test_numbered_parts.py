"""Files that grow, as numbered parts."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from trainload.core.errors import ConflictError, StorageError
from trainload.core.storage.interface import StoreFiles
from trainload.core.storage.numbered_parts import MERGED, NumberedParts
from trainload.core.storage.open_files import open_files


@pytest.fixture(params=["folder", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFiles:
    if request.param == "folder":
        return open_files(tmp_path / "place")
    return open_files(f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def fetched(files: StoreFiles, folder: Path) -> bytes:
    """Return the file as a new reader finds it."""
    path = folder / f"{secrets.token_hex(8)}.jsonl"
    NumberedParts(files, "events", path).fetch()
    return path.read_bytes() if path.exists() else b""


def test_a_reader_has_what_was_published(files: StoreFiles, path: Path, tmp_path: Path) -> None:
    parts = NumberedParts(files, "events", path)
    parts.publish()
    assert fetched(files, tmp_path) == b""
    for number in range(3):
        append(path, f"{number}", "more")
        parts.publish()
        assert fetched(files, tmp_path) == path.read_bytes()


def test_an_incomplete_line_is_published_when_it_is_complete(
    files: StoreFiles, path: Path, tmp_path: Path
) -> None:
    parts = NumberedParts(files, "events", path)
    path.write_text("one\ntw")
    parts.publish()
    assert fetched(files, tmp_path) == b"one\n"
    append(path, "o")
    parts.publish()
    assert fetched(files, tmp_path) == b"one\ntwo\n"


def test_many_parts_are_merged_into_few(
    files: StoreFiles, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainload.core.storage.numbered_parts.MERGED", 4)
    parts = NumberedParts(files, "events", path)
    follower = NumberedParts(files, "events", tmp_path / "followed.jsonl")
    for number in range(75):
        append(path, str(number))
        parts.publish()
        parts.merge()
        if number % 7 == 0:
            follower.fetch()
            assert (tmp_path / "followed.jsonl").read_bytes() == path.read_bytes()
        assert fetched(files, tmp_path) == path.read_bytes()
    assert files.names("events") == [
        "00000001-00000064.jsonl",
        "00000065-00000068.jsonl",
        "00000069-00000072.jsonl",
        "00000073.jsonl",
        "00000074.jsonl",
        "00000075.jsonl",
    ]


def test_a_writer_that_was_killed_while_it_merged_left_a_readable_file(
    files: StoreFiles, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: str) -> None:
        raise KeyboardInterrupt

    parts = NumberedParts(files, "events", path)
    for number in range(MERGED):
        append(path, str(number))
        with monkeypatch.context() as patch:
            if number == MERGED - 1:
                patch.setattr(type(files), "delete", lambda self, path: die(path))
            parts.publish()
            try:
                parts.merge()
            except KeyboardInterrupt:
                assert number == MERGED - 1
    assert len(files.names("events")) == MERGED + 1
    assert fetched(files, tmp_path) == path.read_bytes()


def test_a_successor_continues_and_its_predecessor_does_not(
    files: StoreFiles, path: Path, tmp_path: Path
) -> None:
    first = NumberedParts(files, "events", path)
    append(path, "one")
    first.publish()
    there = tmp_path / "there.jsonl"
    second = NumberedParts(files, "events", there)
    second.fetch()
    append(there, "two")
    second.publish()
    append(path, "zombie")
    with pytest.raises(ConflictError, match="another process writes this file"):
        first.publish()
    assert fetched(files, tmp_path) == b"one\ntwo\n"


def test_a_file_that_begins_anew_follows_the_parts_that_exist(
    files: StoreFiles, path: Path, tmp_path: Path
) -> None:
    append(path, "one")
    NumberedParts(files, "events", path).publish()
    there = tmp_path / "there.jsonl"
    append(there, "two")
    parts = NumberedParts(files, "events", there)
    parts.skip()
    parts.publish()
    assert fetched(files, tmp_path) == b"one\ntwo\n"


@pytest.mark.parametrize("written", [False, True])
def test_a_part_whose_response_was_lost_is_not_written_twice(
    files: StoreFiles, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    create = type(files).create

    def lost(self: Any, path: str, data: bytes) -> bool:
        if written:
            create(self, path, data)
        raise StorageError("no response", where=path)

    parts = NumberedParts(files, "events", path)
    append(path, "one")
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "create", lost)
        with pytest.raises(StorageError, match="no response"):
            parts.publish()
    append(path, "two")
    parts.publish()
    assert fetched(files, tmp_path) == b"one\ntwo\n"
    assert parts.size == len(path.read_bytes())


def test_writers_that_share_a_file_append_what_they_have(
    files: StoreFiles, path: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there.jsonl"
    writers = [NumberedParts(files, "events", each, is_shared=True) for each in (path, there)]
    for each in writers:
        each.skip()
    append(path, "one")
    append(there, "two")
    for each in writers:
        each.publish()
    append(path, "three")
    for each in writers:
        each.publish()
        each.merge()
    assert fetched(files, tmp_path) == b"one\ntwo\nthree\n"


def test_the_last_line_is_published_at_the_end_though_it_is_incomplete(
    files: StoreFiles, path: Path, tmp_path: Path
) -> None:
    parts = NumberedParts(files, "events", path)
    path.write_text("one\ntw")
    parts.publish(is_whole=True)
    assert fetched(files, tmp_path) == b"one\ntw"


@pytest.mark.parametrize("base", [0, 3])
@pytest.mark.parametrize("published", [0, 1, 5, 9])
def test_what_a_killed_writer_had_not_published_is_published_later(
    files: StoreFiles, path: Path, tmp_path: Path, base: int, published: int
) -> None:
    if base:
        earlier = NumberedParts(files, "events", tmp_path / "earlier.jsonl")
        for number in range(base):
            append(tmp_path / "earlier.jsonl", f"earlier {number}")
            earlier.publish()
    before = fetched(files, tmp_path)
    killed = NumberedParts(files, "events", path)
    killed.skip()
    for number in range(9):
        append(path, str(number))
        if number < published:
            killed.publish()
    later = NumberedParts(files, "events", path)
    assert later.match(base)
    later.publish()
    assert fetched(files, tmp_path) == before + path.read_bytes()


def test_a_writer_that_was_replaced_finds_what_its_successor_has_written(
    files: StoreFiles, path: Path, tmp_path: Path
) -> None:
    append(path, "one", "two")
    NumberedParts(files, "events", path).publish()
    there = tmp_path / "there.jsonl"
    successor = NumberedParts(files, "events", there)
    successor.fetch()
    append(there, "three")
    successor.publish()
    append(path, "lost")
    later = NumberedParts(files, "events", path)
    assert not later.match(0)
    assert later.size == len(b"one\ntwo\n")


def test_parts_too_large_for_the_largest_merge_are_merged_in_smaller_ones(
    files: StoreFiles, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainload.core.storage.numbered_parts.MERGED", 4)
    monkeypatch.setattr("trainload.core.storage.numbered_parts._LARGEST_MERGED", 100)
    parts = NumberedParts(files, "events", path)
    for _ in range(16):
        append(path, "x" * 19)
        parts.publish()
    parts.merge()
    assert [name.partition(".")[0] for name in files.names("events")] == [
        "00000001-00000004",
        "00000005-00000008",
        "00000009-00000012",
        "00000013-00000016",
    ]
    assert fetched(files, tmp_path) == path.read_bytes()
