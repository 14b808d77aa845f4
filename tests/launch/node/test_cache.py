"""A node's cache stays within its size limit, and keeps what a process uses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.packaging.places import retrained

import trainload
from trainload.capture.program import InputSpec
from trainload.core.errors import RequestError, StorageError
from trainload.launching.data.dataset import open_dataset
from trainload.launching.data.run_data import open_run_data
from trainload.launching.node.cache import SIZE_VARIABLE, in_use, leave, make_room, use
from trainload.launching.node.fetching import fetched, pinned
from trainload.packaging.package import Package
from trainload.packaging.stores.push import push

ENTRY = 1000
"""Size of an entry in bytes."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Node cache for one test, which holds at most two entries."""
    before = in_use()
    monkeypatch.setenv(SIZE_VARIABLE, str(2.5 * ENTRY / 2**30))
    yield tmp_path / "cache"
    leave(but=before)


def entry(
    cache: Path, name: str, *, age: float, used: bool = False, kind: str = "packages"
) -> Path:
    """Write an entry that was last used `age` seconds ago, and return its folder."""
    before = in_use()
    folder = cache / kind / name
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(ENTRY))
    use(folder)
    os.utime(folder.with_name(f"{name}.used"), (time.time() - age, time.time() - age))
    if not used:
        leave(but=before)
    return folder


def names(cache: Path) -> set[str]:
    return {path.name for path in (cache / "packages").iterdir() if path.is_dir()}


def test_the_longest_unused_go_first(cache: Path) -> None:
    for age in (30, 10, 40, 20):
        entry(cache, str(age), age=age)
    make_room(cache)
    assert names(cache) == {"10", "20"}


@pytest.mark.parametrize("kind", ["data", "compiled", "kernels"])
def test_entries_of_all_kinds_go(cache: Path, kind: str) -> None:
    old = entry(cache, "old", age=300, kind=kind)
    entry(cache, "package", age=200)
    entry(cache, "another", age=100)
    make_room(cache)
    assert not old.exists()


def test_nothing_goes_while_there_is_room(cache: Path) -> None:
    for age in (30, 10):
        entry(cache, str(age), age=age)
    make_room(cache)
    assert names(cache) == {"10", "30"}


def test_what_this_process_uses_stays(cache: Path) -> None:
    entry(cache, "40", age=40, used=True)
    for age in (30, 20, 10):
        entry(cache, str(age), age=age)
    make_room(cache)
    assert names(cache) == {"40", "10"}


def test_what_another_process_uses_stays_until_it_ends(cache: Path) -> None:
    old = entry(cache, "40", age=40)
    for age in (30, 20, 10):
        entry(cache, str(age), age=age)
    code = (
        "import pathlib, sys; from trainload.launching.node.cache import use;"
        f" use(pathlib.Path({str(old)!r})); print(); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.utime(old.with_name("40.used"), (0, 0))
        make_room(cache)
        assert names(cache) == {"40", "10"}
        child.communicate()
    entry(cache, "5", age=5)
    make_room(cache)
    assert names(cache) == {"10", "5"}


def test_a_folder_that_cannot_be_written_is_used_all_the_same(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        use(cache / "packages" / "1")
    assert cache / "packages" / "1" not in in_use()


def test_files_that_packages_share_count_once(cache: Path) -> None:
    first = entry(cache, "30", age=30)
    for age in (20, 10):
        (cache / "packages" / str(age)).mkdir()
        os.link(first / "weights", cache / "packages" / str(age) / "weights")
        use(cache / "packages" / str(age))
    make_room(cache)
    assert names(cache) == {"30", "20", "10"}


def test_what_a_killed_process_had_begun_to_remove_goes(cache: Path) -> None:
    entry(cache, "10", age=10).rename(cache / "packages" / "10.removed")
    make_room(cache)
    assert names(cache) == set()


def test_without_a_size_a_tenth_of_the_disk_is_left_free(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age in (30, 20, 10):
        entry(cache, str(age), age=age)
    monkeypatch.delenv(SIZE_VARIABLE)
    monkeypatch.setattr(
        os, "statvfs", lambda _path: SimpleNamespace(f_bavail=11 - len(names(cache)), f_blocks=100)
    )
    make_room(cache)
    assert names(cache) == {"10"}


def test_a_size_that_is_none_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "much")
    with pytest.raises(
        RequestError,
        match=r"TRAINLOAD_CACHE_GIB: this is not a size \(expected a number of GiB, got much\)",
    ):
        make_room(cache)


def test_releases_that_are_fetched_take_the_place_of_others(
    packaged: Package, tmp_path: Path, cache: Path
) -> None:
    push(packaged.path, tmp_path / "store", line="line")
    for number in (2, 3):
        push(
            retrained(packaged, tmp_path / f"{number}.tl", "lin.weight", by=float(number)).path,
            tmp_path / "store",
            line="line",
        )
    before = in_use()
    for number in (1, 2, 3):
        leave(but=before)
        name, digest = pinned(f"{tmp_path / 'store'}#line/{number}")
        last = fetched(name, cache, digest)
    assert names(cache) == {last.name}
    assert trainload.open(last).digest == digest


def test_data_that_is_converted_takes_the_place_of_others(tmp_path: Path, cache: Path) -> None:
    before, spec = in_use(), InputSpec("x", "float32", ("batch", 2))
    for number in (1, 2, 3):
        leave(but=before)
        rows = np.full((250, 2), number, np.float32)
        trainload.write_rows([{"x": rows}], tmp_path / f"{number}.arrow")
        data = open_dataset(str(tmp_path / f"{number}.arrow"), [spec], cache / "data")
        assert np.array_equal(data.batch(np.arange(250))["x"].numpy(), rows)
    # 2.1 KiB each; the last one was not counted yet when room was made for it
    assert len(list((cache / "data").glob("*/columns.json"))) == 2


def test_a_data_set_that_is_larger_than_the_cache_may_be_is_refused_before_it_is_read(
    tiny: Package, tiny_data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, str(10 / 2**30))
    with pytest.raises(
        StorageError, match=r"the data set does not fit.*at most 10 bytes, \$TRAINLOAD_CACHE_GIB"
    ):
        open_run_data(tiny_data, tiny, 4, cache / "data")
    assert list(cache.glob("data/*/columns.json")) == []


def test_a_data_set_that_the_disk_has_no_room_for_is_refused_before_it_is_read(
    tiny: Package, tiny_data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SIZE_VARIABLE)
    monkeypatch.setattr(
        os, "statvfs", lambda _path: SimpleNamespace(f_bavail=1, f_blocks=1, f_frsize=10)
    )
    with pytest.raises(StorageError, match=r"the data set does not fit.*at most 10 bytes, .*free"):
        open_run_data(tiny_data, tiny, 4, cache / "data")


def test_entries_make_room_for_a_data_set_that_needs_their_space(
    tiny: Package, tiny_data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age in (30, 20, 10):
        entry(cache, str(age), age=age)
    monkeypatch.delenv(SIZE_VARIABLE)
    free = {3: 0, 2: 10**9}

    def disk(_path: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free[len(names(cache))], f_blocks=0, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", disk)
    open_run_data(tiny_data, tiny, 4, cache / "data")
    assert names(cache) == {"20", "10"}
