"""Files that gc removes, and files that it keeps."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.places import Place, retrained

from trainload.core.errors import ConflictError, IntegrityError, PackageError, StorageError
from trainload.core.storage.lease import HeldLease, LeaseRecord
from trainload.packaging.package import Package
from trainload.packaging.stores import leases
from trainload.packaging.stores.collect import GcReport, gc
from trainload.packaging.stores.leases import PushedBlobs, PushLease, gc_lease, push_leases
from trainload.packaging.stores.pull import pull
from trainload.packaging.stores.push import push
from trainload.packaging.stores.store import blob_path


def clean(place: Place, **options: Any) -> GcReport:
    return gc(place.url, options=place.options, **options)


def put(package: Package, place: Place, **options: Any) -> Any:
    return push(package.path, place.url, options=place.options, **options)


class Break(Exception):
    pass


def break_off(package: Package, place: Place) -> None:
    """Abort a push that has sent something and published nothing."""
    calls = 0

    def on_progress(_done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise Break

    with pytest.raises(Break):
        put(package, place, on_progress=on_progress)


def test_what_releases_need_is_kept(
    packaged: Package, second: Package, local_place: Place, tmp_path: Path
) -> None:
    put(packaged, local_place)
    put(second, local_place, line="main", promote=False)
    report = clean(local_place, grace=0)
    assert (report.removed_blobs, report.removed_bytes) == (0, 0)
    for number in (1, 2):
        pull(
            local_place.url, tmp_path / f"{number}.tl", release=number, options=local_place.options
        )


@pytest.mark.matrix("folder", "memory")
def test_the_blobs_of_a_push_that_was_just_broken_off_wait_for_it(
    packaged: Package, place: Place
) -> None:
    break_off(packaged, place)
    report = clean(place)
    assert (report.removed_blobs, report.live_pushes, report.dead_pushes) == (0, 1, 0)
    assert report.kept_blobs > 0
    assert put(packaged, place).present_bytes == report.kept_bytes


def test_the_blobs_of_a_push_that_was_broken_off_long_ago_go(
    packaged: Package, local_place: Place
) -> None:
    break_off(packaged, local_place)
    told = clean(local_place, grace=0, dry_run=True)
    assert put(packaged, local_place, line="x").present_bytes > 0
    assert told.removed_blobs > 0 and told.dead_pushes == 1


def test_a_dry_run_says_what_a_run_does(packaged: Package, local_place: Place) -> None:
    break_off(packaged, local_place)
    told, done = clean(local_place, grace=0, dry_run=True), clean(local_place, grace=0)
    assert (told.removed_blobs, told.removed_bytes, told.dead_pushes) == (
        done.removed_blobs,
        done.removed_bytes,
        1,
    )
    assert done.removed_blobs > 0
    assert put(packaged, local_place).present_bytes == 0


@pytest.mark.matrix("folder", "memory")
def test_keep_removes_the_files_of_old_releases_and_no_record(
    packaged: Package, second: Package, place: Place, tmp_path: Path
) -> None:
    put(packaged, place)
    put(second, place)
    report = clean(place, keep=1, grace=0)
    assert report.removed_releases == ("main 1",)
    # manifest, chunks and one file of weights: the second release also has the rest
    assert report.removed_blobs == 3
    states = place.store().releases("main")
    assert [state.status for state in states] == ["removed", "current"]
    with pytest.raises(StorageError, match="files were removed"):
        pull(place.url, tmp_path / "1.tl", release=1, options=place.options)
    assert pull(place.url, tmp_path / "2.tl", options=place.options).digest == second.digest
    assert states[1].release.parent == states[0].release.id


def test_keep_leaves_the_current_release(
    packaged: Package, second: Package, local_place: Place, tmp_path: Path
) -> None:
    put(packaged, local_place)
    put(second, local_place, promote=False)
    assert clean(local_place, keep=1, grace=0).removed_releases == ()
    assert (
        pull(local_place.url, tmp_path / "1.tl", options=local_place.options).digest
        == packaged.digest
    )


def test_keep_can_be_said_of_one_line(packaged: Package, second: Package, folder: Place) -> None:
    for line in ("one", "two"):
        put(packaged, folder, line=line)
        put(second, folder, line=line)
    assert clean(folder, keep=1, lines=("two",), grace=0).removed_releases == ("two 1",)
    assert [state.status for state in folder.store().releases("one")] == ["promoted", "current"]


def test_keep_is_said_of_lines_that_there_are(packaged: Package, folder: Place) -> None:
    put(packaged, folder)
    with pytest.raises(StorageError, match=r"no such line.*main.*mian"):
        clean(folder, keep=1, lines=("mian",))


def test_a_spared_release_keeps_its_files(
    packaged: Package, second: Package, folder: Place, tmp_path: Path
) -> None:
    put(packaged, folder)
    put(second, folder)
    assert clean(folder, keep=1, spared=[("main", "00000001")], grace=0).removed_releases == ()
    assert (
        pull(folder.url, tmp_path / "1.tl", release=1, options=folder.options).digest
        == packaged.digest
    )


def test_a_release_whose_files_were_removed_cannot_become_current(
    packaged: Package, second: Package, folder: Place
) -> None:
    put(packaged, folder)
    put(second, folder)
    clean(folder, keep=1, grace=0)
    with pytest.raises(StorageError, match="files were removed"):
        folder.store().promote("main", 1)
    report = put(packaged, folder)
    assert (report.new, report.release, report.current) == (True, "3", "3")


def test_a_promotion_that_gc_overtakes_is_taken_back(
    packaged: Package, second: Package, folder: Place
) -> None:
    put(packaged, folder)
    put(second, folder)
    store = folder.store()
    store.mark("main", 1, "candidate", "")
    demand = type(store)._check_usable

    def overtaken(self: Any, release: Any) -> None:
        demand(self, release)
        self.mark("main", 1, "removed", "gc was quicker")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "_check_usable", overtaken)
        with pytest.raises(StorageError, match="gc was quicker"):
            store.promote("main", 1)
    assert store.release("main").package == second.digest


def test_a_damaged_record_stops_gc_before_it_removes_anything(
    packaged: Package, second: Package, folder: Place
) -> None:
    put(packaged, folder)
    put(second, folder)
    record = Path(folder.url) / "lines/main/releases/00000001.json"
    record.write_bytes(record.read_bytes()[:-2])
    before = set(Path(folder.url).rglob("*"))
    with pytest.raises(PackageError):
        clean(folder, keep=1, grace=0)
    after = {
        path
        for path in Path(folder.url).rglob("*")
        if "gc" not in path.relative_to(folder.url).parts
    }
    assert after == before


def test_a_push_waits_while_gc_is_at_work_and_then_sends_what_it_removed(
    packaged: Package, folder: Place
) -> None:
    put(packaged, folder, line="old")
    guard = gc_lease(folder.store())
    waited: list[str] = []
    reports: list[Any] = []
    thread = threading.Thread(
        target=lambda: reports.append(put(packaged, folder, line="new", on_wait=waited.append))
    )
    thread.start()
    while not waited:
        time.sleep(0.01)
    blob = blob_path(packaged.manifest.files["graphs/train.json"].sha256)
    folder.store().files.delete(blob)  # as a concurrent gc might
    assert not reports
    guard.close()
    thread.join(timeout=60)
    assert reports[0].sent_files == 1
    assert "gc is running" in waited[0]


def test_gc_sees_a_push_that_began_before_it(packaged: Package, folder: Place) -> None:
    put(packaged, folder)
    store = folder.store()
    store.mark("main", 1, "removed", "to be removed")
    lease = PushedBlobs(store, [packaged.manifest.files["graphs/train.json"].sha256])
    report = clean(folder)
    assert report.kept_blobs == 1
    lease.end()
    assert clean(folder).kept_blobs == 0


def test_a_push_that_gc_took_for_dead_does_not_publish(packaged: Package, folder: Place) -> None:
    seen: list[int] = []

    def taken_for_dead(done: int, total: int) -> None:
        seen.append(done)
        if seen[-2:] == [total, total]:  # everything has been sent
            gc(folder.url, grace=0)

    with pytest.raises(StorageError, match="considered it dead"):
        put(packaged, folder, on_progress=taken_for_dead)
    assert folder.store().lines() == ()


@pytest.mark.matrix("folder", "memory")
def test_two_gcs_do_not_run_at_once(packaged: Package, place: Place) -> None:
    put(packaged, place)
    guard = gc_lease(place.store())
    with pytest.raises(ConflictError, match="another gc is running"):
        clean(place)
    guard.close()
    assert clean(place).removed_blobs == 0


def test_the_lock_of_a_gc_that_was_killed_ends(
    packaged: Package, folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(packaged, folder)
    monkeypatch.setattr(leases, "GC_SECONDS", -1.0)
    gc_lease(folder.store())
    monkeypatch.undo()
    assert clean(folder).removed_blobs == 0
    assert [path.name for path in (Path(folder.url) / "gc/leases").iterdir()] == ["00000002.json"]


@pytest.mark.parametrize("over", [False, True], ids=["at work", "over"])
def test_a_gc_does_not_take_the_place_of_one_that_began_since_it_looked(
    packaged: Package, folder: Place, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    put(packaged, folder)
    clean(folder)
    slow, others = folder.store(), folder.store()
    read = slow.files.read
    begun: list[HeldLease[LeaseRecord]] = []

    def and_another_begins(path: str, limit: int) -> bytes | None:
        data = read(path, limit)
        if path == "gc/heartbeats/00000001.json" and not begun:
            begun.append(gc_lease(others))
            if over:
                begun[0].close()
        return data

    monkeypatch.setattr(slow.files, "read", and_another_begins)
    if over:
        held = gc_lease(slow)
        assert held.id == "00000003"
        held.close()
    else:
        with pytest.raises(ConflictError, match="another gc is running"):
            gc_lease(slow)
        begun[0].close()


def test_a_lease_of_another_number_is_refused(packaged: Package, folder: Place) -> None:
    put(packaged, folder)
    clean(folder)
    lock = Path(folder.url) / "gc/leases/00000001.json"
    lock.rename(lock.with_name("00000007.json"))
    with pytest.raises(IntegrityError, match="a lease record has the wrong number"):
        clean(folder)


def test_a_gc_that_lost_its_lease_stops(
    packaged: Package, folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(packaged, folder)
    guard = gc_lease(folder.store())
    monkeypatch.setattr(guard, "_sure_until", 0.0)
    with pytest.raises(ConflictError, match="the lease is lost"):
        guard.check()


def test_a_lease_says_what_its_push_relies_on(packaged: Package, local_place: Place) -> None:
    break_off(packaged, local_place)
    (lease,) = push_leases(local_place.store()).values()
    assert isinstance(lease, PushLease)
    assert set(lease.blobs) >= {entry.sha256 for entry in packaged.manifest.files.values()} | {
        packaged.digest
    }
    assert abs(lease.renewed - time.time()) < 60


def test_drafts_of_killed_writers_go_when_they_are_old(packaged: Package, folder: Place) -> None:
    put(packaged, folder)
    draft = Path(folder.url) / "blobs/sha256/ab/.abc.0123.part"
    draft.parent.mkdir(exist_ok=True)
    draft.write_text("half")
    assert clean(folder).drafts == 0
    os.utime(draft, (1, 1))
    assert clean(folder).drafts == 1
    assert not draft.exists()


def test_weights_that_two_releases_share_stay_while_one_needs_them(
    packaged: Package, folder: Place, tmp_path: Path
) -> None:
    put(packaged, folder)
    third = retrained(packaged, tmp_path / "third.tl", "lin.weight", by=3.0)
    put(third, folder)
    clean(folder, keep=1, grace=0)
    assert pull(folder.url, tmp_path / "back.tl").digest == third.digest
