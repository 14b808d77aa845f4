"""A file, a link or a folder is written completely or not at all, with concurrent writers too."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import fork_server

from trainload.core import atomic
from trainload.core.paths import LONGEST_NAME

SIZE, TIMES, WRITERS = 200_000, 40, 4


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace_often(path: Path, number: int) -> None:
    for _ in range(TIMES):
        atomic.replace_file(path, content(number), durable=False)


def create(path: Path, number: int) -> bool:
    return atomic.create_file(path, content(number))


def concurrently(function: Callable[[Path, int], Any], path: Path) -> list[Any]:
    """Call `function` in WRITERS concurrent processes. Return the results."""
    with fork_server().Pool(WRITERS) as pool:
        return pool.starmap(function, [(path, number) for number in range(WRITERS)], chunksize=1)


def test_a_file_that_several_processes_replace_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content(0))
    with fork_server().Pool(WRITERS) as pool:
        replacing = pool.starmap_async(
            replace_often, [(path, number) for number in range(WRITERS)], chunksize=1
        )
        seen = [path.read_bytes()]
        while not replacing.ready():
            seen.append(path.read_bytes())
        replacing.get()
    assert {data == content(data[0]) for data in seen} == {True}
    assert listed(tmp_path) == ["state.json"]


def test_of_several_processes_that_create_a_file_exactly_one_succeeds(tmp_path: Path) -> None:
    created = concurrently(create, tmp_path / "run.json")
    assert created.count(True) == 1
    assert (tmp_path / "run.json").read_bytes() == content(created.index(True))
    assert listed(tmp_path) == ["run.json"]


def test_processes_with_one_process_id_have_temporary_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two containers that share a file system may have one process id."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with (
        atomic.temporary_file(tmp_path / "file", b"first") as first,
        atomic.temporary_file(tmp_path / "file", b"second") as second,
    ):
        assert (first.read_bytes(), second.read_bytes()) == (b"first", b"second")


def test_a_file_of_the_same_content_counts_as_created(tmp_path: Path) -> None:
    assert atomic.create_file(tmp_path / "file", b"same")
    assert atomic.create_file(tmp_path / "file", b"same")
    assert not atomic.create_file(tmp_path / "file", b"else")


def test_a_link_at_the_path_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"same")
    (tmp_path / "file").symlink_to("elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        atomic.create_file(tmp_path / "file", b"same")


def test_a_file_is_created_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: Path, _target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert atomic.create_file(tmp_path / "file", b"first")
    assert not atomic.create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert listed(tmp_path) == ["file"]


def test_a_file_has_the_permissions_that_were_asked_for(tmp_path: Path) -> None:
    atomic.create_file(tmp_path / "key", b"secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "writer",
    [atomic.replacing, atomic.new_folder, atomic.temporary_folder],
    ids=lambda writer: writer.__name__,
)
def test_nothing_is_left_of_a_write_that_fails(
    writer: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path
) -> None:
    def fail() -> None:
        with writer(tmp_path / "target") as temporary:
            (temporary / "part" if temporary.is_dir() else temporary).write_bytes(b"half")
            assert len(listed(tmp_path)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert listed(tmp_path) == []


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail() -> None:
        with atomic.replacing(tmp_path / "file") as temporary:
            temporary.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert listed(tmp_path) == ["file"]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with atomic.new_folder(tmp_path / "build") as temporary:
        (temporary / "graph").write_bytes(b"code")
        assert not (tmp_path / "build").exists()
    assert listed(tmp_path) == ["build"]
    assert (tmp_path / "build" / "graph").read_bytes() == b"code"


def test_a_folder_does_not_replace_another_one(tmp_path: Path) -> None:
    (tmp_path / "build" / "graph").mkdir(parents=True)
    with pytest.raises(OSError, match="Directory not empty"), atomic.new_folder(tmp_path / "build"):
        pass
    assert listed(tmp_path) == ["build"]


def test_a_link_is_replaced(tmp_path: Path) -> None:
    for target in ("1", "2"):
        (tmp_path / target).mkdir()
        atomic.replace_link(tmp_path / "current", target)
    assert (tmp_path / "current").readlink() == Path("2")
    assert listed(tmp_path) == ["1", "2", "current"]


def test_temporary_folders_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    for _ in range(2):
        atomic.temporary_beside(tmp_path / "build[1]").mkdir()
    kept = [atomic.temporary_beside(tmp_path / "build1"), tmp_path / "build[1]"]
    for path in kept:
        path.mkdir()
    atomic.remove_temporaries(tmp_path / "build[1]")
    assert listed(tmp_path) == sorted(path.name for path in kept)


def test_the_longest_name_has_a_temporary_file(tmp_path: Path) -> None:
    atomic.replace_file(tmp_path / ("n" * LONGEST_NAME), b"data")
    assert listed(tmp_path) == ["n" * LONGEST_NAME]
