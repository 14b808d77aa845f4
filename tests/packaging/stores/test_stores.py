"""Packages are pushed to every kind of place, and pulled from there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.places import Place, memory_place, travelling
from tests.packaging.tampering import flip

from trainload.core.canonical_json import sha256_file
from trainload.core.errors import ConflictError, StorageError, UnsafePackageError
from trainload.core.storage import folder_files as store_folder
from trainload.core.storage import remote_files as store_remote
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import Expected
from trainload.core.storage.remote_files import RemoteFiles
from trainload.packaging.package import Package, open_package
from trainload.packaging.signatures.verify import verify_package
from trainload.packaging.stores.pull import pull
from trainload.packaging.stores.push import local_package, push
from trainload.packaging.stores.releases import StoreInfo
from trainload.packaging.stores.store import Store

CHANGED = ("manifest.json", "weights/chunks.json", "weights/model-00002-of-00003.safetensors")


def sizes(package: Package, *files: str) -> int:
    return sum((package.path / file).stat().st_size for file in files)


def put(package: Path, place: Place, **options: Any) -> Any:
    return push(package, place.url, options=place.options, **options)


def get(place: Place, path: Path, **options: Any) -> Any:
    return pull(place.url, path, options=place.options, **options)


def test_what_is_pulled_is_what_was_pushed(packaged: Package, place: Place, tmp_path: Path) -> None:
    pushed = put(packaged.path, place)
    pulled = get(place, tmp_path / "back.tl")
    assert travelling(tmp_path / "back.tl") == travelling(packaged.path)
    assert (
        open_package(tmp_path / "back.tl").digest
        == packaged.digest
        == pushed.digest
        == pulled.digest
    )
    assert verify_package(tmp_path / "back.tl").ok


def test_every_byte_is_counted(packaged: Package, local_place: Place, tmp_path: Path) -> None:
    # files of equal content count once
    total = sum(map(len, set(travelling(packaged.path).values())))
    seen: list[tuple[int, int]] = []
    report = put(
        packaged.path, local_place, on_progress=lambda done, whole: seen.append((done, whole))
    )
    assert (report.sent_bytes, report.present_bytes, report.bytes) == (total, 0, total)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    pulled = get(local_place, tmp_path / "back.tl")
    assert (pulled.fetched_bytes, pulled.local_bytes, pulled.bytes) == (total, 0, total)


def test_a_package_is_not_published_twice(packaged: Package, local_place: Place) -> None:
    first, again = put(packaged.path, local_place), put(packaged.path, local_place)
    assert (first.new, again.new) == (True, False)
    assert (again.release, again.sent_bytes) == (first.release, 0)
    assert len(local_place.store().releases("main")) == 1
    assert len(local_place.store().history("main")) == 1


@pytest.mark.matrix("folder", "memory")
def test_a_retrained_release_sends_only_the_weight_files_that_changed(
    packaged: Package, second: Package, place: Place
) -> None:
    put(packaged.path, place)
    report = put(second.path, place)
    assert report.sent_files == len(CHANGED)
    assert report.sent_bytes == sizes(second, *CHANGED)
    assert report.sent_bytes + report.present_bytes == report.bytes


@pytest.mark.matrix("folder", "memory")
def test_only_what_changed_is_fetched_where_an_older_release_lies(
    packaged: Package, second: Package, place: Place, tmp_path: Path
) -> None:
    put(packaged.path, place)
    put(second.path, place)
    folder = tmp_path / "packages"
    folder.mkdir()
    get(place, folder / "1.tl", release=1)
    report = get(place, folder / "2.tl")
    assert report.fetched_bytes == sizes(second, *CHANGED)
    assert (folder / "2.tl/graphs/train.json").samefile(folder / "1.tl/graphs/train.json")
    assert travelling(folder / "2.tl") == travelling(second.path)


def test_a_release_knows_its_parent(packaged: Package, second: Package, local_place: Place) -> None:
    put(packaged.path, local_place)
    put(second.path, local_place)
    releases = [state.release for state in local_place.store().releases("main")]
    assert [release.parent for release in releases] == [None, releases[0].id]
    assert (releases[0].program, releases[0].weights == releases[1].weights) == (
        releases[1].program,
        False,
    )


def test_the_last_release_that_was_pushed_is_current(
    packaged: Package, second: Package, local_place: Place
) -> None:
    put(packaged.path, local_place)
    assert put(second.path, local_place).current == "2"
    assert [state.status for state in local_place.store().releases("main")] == [
        "promoted",
        "current",
    ]


def test_a_release_need_not_become_current(
    packaged: Package, second: Package, local_place: Place, tmp_path: Path
) -> None:
    put(packaged.path, local_place)
    assert put(second.path, local_place, promote=False).current == "1"
    assert get(local_place, tmp_path / "current.tl").digest == packaged.digest
    assert get(local_place, tmp_path / "latest.tl", release="latest").digest == second.digest


def test_an_older_release_can_be_current_again_and_the_history_says_why(
    packaged: Package, second: Package, local_place: Place
) -> None:
    put(packaged.path, local_place)
    put(second.path, local_place)
    store = local_place.store()
    store.promote("main", 1, reason="the second one is worse")
    assert [pointer.release[-1] for pointer in store.history("main")] == ["1", "2", "1"]
    assert store.history("main")[-1].reason == "the second one is worse"
    assert store.release("main").package == packaged.digest


@pytest.mark.matrix("folder", "memory")
def test_a_condition_on_what_is_current_is_kept(
    packaged: Package, second: Package, place: Place
) -> None:
    put(packaged.path, place, only_if="none")
    with pytest.raises(ConflictError, match=r"expected release 7, got release 1"):
        put(second.path, place, only_if=7)
    store = place.store()
    assert [state.status for state in store.releases("main")] == ["current", "candidate"]
    store.promote("main", 2, only_if=1)
    with pytest.raises(ConflictError, match=r"expected none, got release 2"):
        store.promote("main", 1, only_if="none")


def test_a_rejected_release_is_kept_with_the_reason_and_cannot_become_current(
    packaged: Package, second: Package, local_place: Place
) -> None:
    put(packaged.path, local_place)
    put(second.path, local_place, rejected="the loss rose", facts={"loss": 5.5, "rows": 91})
    store = local_place.store()
    state = store.releases("main")[1]
    assert (state.status, state.reason, state.release.facts) == (
        "rejected",
        "the loss rose",
        {"loss": 5.5, "rows": 91},
    )
    with pytest.raises(StorageError, match=r"was rejected .*the loss rose"):
        store.promote("main", 2)
    store.mark("main", 2, "candidate", "the test set was wrong")
    store.promote("main", 2)
    assert store.releases("main")[1].status == "current"


def test_lines_are_apart(
    packaged: Package, second: Package, local_place: Place, tmp_path: Path
) -> None:
    put(packaged.path, local_place, line="gpt")
    put(second.path, local_place, line="gpt-small")
    assert local_place.store().lines() == ("gpt", "gpt-small")
    with pytest.raises(StorageError, match=r"several lines .*gpt, gpt-small"):
        get(local_place, tmp_path / "some.tl")
    assert get(local_place, tmp_path / "small.tl", line="gpt-small").digest == second.digest


def test_signatures_travel_and_derived_graphs_do_not(
    copied: Path, local_place: Place, tmp_path: Path
) -> None:
    for file in ("signatures/me.sig", "derived/cpu/step.json"):
        (copied / file).parent.mkdir(parents=True)
        (copied / file).write_text("x")
    put(copied, local_place)
    get(local_place, tmp_path / "back.tl")
    assert (tmp_path / "back.tl/signatures/me.sig").read_text() == "x"
    assert not (tmp_path / "back.tl/derived").exists()


def test_debug_travels_only_where_it_is_wanted(
    packaged: Package, local_place: Place, tmp_path: Path
) -> None:
    put(packaged.path, local_place, line="all")
    put(packaged.path, local_place, line="bare", debug=False)
    assert not any(file.startswith("debug/") for file in local_place.store().release("bare").files)
    get(local_place, tmp_path / "1.tl", line="all", debug=False)
    get(local_place, tmp_path / "2.tl", line="all")
    assert [(tmp_path / name / "debug").exists() for name in ("1.tl", "2.tl")] == [False, True]


def test_a_package_that_is_signed_later_is_another_release(copied: Path, folder: Place) -> None:
    put(copied, folder)
    (copied / "signatures").mkdir()
    (copied / "signatures/me.sig").write_text("x")
    again = put(copied, folder)
    assert (again.new, again.sent_files) == (True, 1)


class Break(Exception):
    """An exception that aborts a push."""


def broken_off(after: int) -> Any:
    calls = 0

    def on_progress(_done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Break

    return on_progress


@pytest.mark.matrix("folder-*", "memory-9")
@pytest.mark.parametrize("after", [2, 9])
def test_a_push_that_is_broken_off_shows_nothing_and_goes_on_where_it_stopped(
    packaged: Package, place: Place, after: int
) -> None:
    with pytest.raises(Break):
        put(packaged.path, place, on_progress=broken_off(after))
    assert place.store().lines() == ()
    report = put(packaged.path, place)
    # the upload in progress may have been completed
    assert report.files - report.sent_files in (after - 1, after)
    assert report.sent_bytes + report.present_bytes == report.bytes


def test_the_path_of_a_package_is_not_written_over(
    packaged: Package, folder: Place, tmp_path: Path
) -> None:
    put(packaged.path, folder)
    (tmp_path / "taken.tl").mkdir()
    with pytest.raises(StorageError, match="already exists"):
        get(folder, tmp_path / "taken.tl")


def test_a_folder_of_other_things_does_not_become_a_store(
    packaged: Package, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StorageError, match=r"other files, but no store .*thesis\.tex"):
        push(packaged.path, tmp_path)


def test_a_store_that_another_writer_makes_meanwhile_is_used(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = FolderFiles.names

    def overtaken(self: FolderFiles, inner: str) -> list[str]:
        monkeypatch.undo()
        self.replace("store.json", StoreInfo().to_bytes())
        self.replace("pushes/x.json", b"{}")
        return names(self, inner)

    monkeypatch.setattr(FolderFiles, "names", overtaken)
    assert Store(folder.url, create=True).lines() == ()


@pytest.mark.matrix("folder", "memory")
def test_a_damaged_package_is_not_published(copied: Path, place: Place) -> None:
    weights = copied / "weights/model-00002-of-00003.safetensors"
    flip(weights, -1)
    with pytest.raises(
        ValueError,
        match=r"model-00002-of-00003.safetensors: a file does not match its entry in the manifest",
    ):
        put(copied, place)
    assert place.store().lines() == ()


@pytest.mark.parametrize("name", ["GPT", "../up", "a/b", "", ".hidden", "a" * 65, "end."])
def test_a_line_has_a_plain_name(packaged: Package, folder: Place, name: str) -> None:
    with pytest.raises(StorageError, match="not a valid line name"):
        put(packaged.path, folder, line=name)


def test_a_place_that_ignores_conditions_gets_ids_that_cannot_collide(
    packaged: Package, second: Package, folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderFiles, "exclusive", False)
    put(packaged.path, folder)
    report = put(second.path, folder)
    store = folder.store()
    assert [len(release) for release in store.release_ids("main")] == [25, 25]
    assert store.release("main").name == report.release == report.current
    with pytest.raises(StorageError, match="does not support conditional writes"):
        store.promote("main", report.release, only_if="none")


def test_a_server_that_ignores_conditions_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    files = RemoteFiles(memory_place().url, {})
    put_file = files._fs.pipe_file
    monkeypatch.setattr(
        files._fs, "pipe_file", lambda path, data, mode="overwrite": put_file(path, data)
    )
    assert not files.exclusive
    assert list(files.walk("")) == []


def test_a_record_that_is_replaced_by_a_longer_one_while_it_is_read_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = RemoteFiles(memory_place().url, {})
    files.replace("lines/x", b"short")
    cat_file = files._fs.cat_file

    def late(path: str, **part: int) -> bytes:
        files.replace("lines/x", b"longer than that")
        return bytes(cat_file(path, **part))

    monkeypatch.setattr(files._fs, "cat_file", late)
    assert files.read("lines/x", 100) == b"longer than that"


def test_a_file_is_read_up_to_a_limit_and_an_empty_one_is_empty(place: Place) -> None:
    files = Store(place.url, place.options, create=True).files
    assert files.create("lines/x", b"12345")
    assert files.create("lines/y", b"")
    assert (files.read("lines/x", 5), files.read("lines/y", 5), files.read("lines/z", 5)) == (
        b"12345",
        b"",
        None,
    )
    with pytest.raises(UnsafePackageError, match="too large"):
        files.read("lines/x", 4)


def test_a_put_that_was_repeated_since_its_answer_was_lost_finds_its_own_file(place: Place) -> None:
    files = Store(place.url, place.options, create=True).files
    assert files.create("lines/x", b"mine")
    assert files.create("lines/x", b"mine")
    assert not files.create("lines/x", b"another's")


def test_where_a_put_is_not_atomic_files_are_moved_to_their_names(
    packaged: Package, second: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_remote, "_ATOMIC_PUT", frozenset())
    place = memory_place()
    moved: list[str] = []
    fs = RemoteFiles(place.url, {})._fs
    move = fs.mv

    def noted(draft: str, path: str) -> None:
        moved.append(draft)
        move(draft, path)

    monkeypatch.setattr(fs, "mv", noted)
    put(packaged.path, place)
    put(second.path, place)
    assert all("/." in draft and draft.endswith(".part") for draft in moved)
    assert len(moved) > 20
    assert get(place, tmp_path / "back.tl").digest == second.digest


def test_a_store_can_be_moved(packaged: Package, folder: Place, tmp_path: Path) -> None:
    put(packaged.path, folder)
    shutil.move(folder.url, tmp_path / "elsewhere")
    assert pull(tmp_path / "elsewhere", tmp_path / "back.tl").digest == packaged.digest


def test_a_large_file_is_moved_in_blocks(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 18 * 2**20 if place.kind == "s3" else 2**20  # three parts
    (tmp_path / "large").write_bytes(bytes(range(256)) * (size // 256))
    monkeypatch.setattr(store_folder, "BLOCK", size // 16)
    monkeypatch.setattr(store_remote, "BLOCK", size // 16)
    expected = Expected(size, sha256_file(tmp_path / "large"))
    files = Store(place.url, place.options, create=True).files
    files.send("blobs/large", tmp_path / "large", expected, lambda _count: None)
    blocks = list(files.receive("blobs/large", size))
    assert set(map(len, blocks)) == {size // 16}
    assert b"".join(blocks) == (tmp_path / "large").read_bytes()


def test_what_a_package_holds_is_read_without_its_weights(copied: Path, packaged: Package) -> None:
    weights = copied / "weights/model-00002-of-00003.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert local_package(copied).digest == packaged.digest
