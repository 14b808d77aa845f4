"""Builds in a store: pushed once, found by their job, kept by gc."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builds import TARGET, made_build
from tests.packaging.signatures.sign_and_verify import sign
from tests.packaging.signers import Signers

from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import (
    IntegrityError,
    PackageError,
    StorageError,
    UnsafePackageError,
)
from trainload.packaging.builds.build_folder import read_build
from trainload.packaging.package import Package
from trainload.packaging.stores.collect import gc
from trainload.packaging.stores.leases import PushedBlobs
from trainload.packaging.stores.push import push
from trainload.packaging.stores.store import Store, blob_path
from trainload.packaging.stores.stored_builds import (
    StoredBuild,
    builds_of,
    fetch_part,
    fetch_record,
    push_build,
)


def signed_build(path: Path, signers: Signers, content: str = "code") -> Path:
    made_build(path, content=content)
    sign(path, signers.alice.key, "alice")
    return path


@pytest.fixture
def build(tmp_path: Path, signers: Signers) -> Path:
    return signed_build(tmp_path / "tiny.build", signers)


@pytest.fixture
def store(tmp_path: Path, build: Path) -> Store:
    """A store with the build."""
    push_build(build, tmp_path / "store")
    return Store(tmp_path / "store")


def only_build(store: Store) -> StoredBuild:
    (stored,) = builds_of(store, TARGET.job)
    return stored


def test_a_build_arrives_as_it_was_pushed(store: Store, build: Path, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "part").mkdir()
    fetched = fetch_record(store, only_build(store), tmp_path / "record")
    fetch_part(store, fetched[0], 0, tmp_path / "part")
    assert fetched == read_build(build)
    assert (tmp_path / "record" / "signatures" / "alice.sig").read_bytes() == (
        build / "signatures" / "alice.sig"
    ).read_bytes()
    assert {
        path.relative_to(tmp_path / "part"): path.read_bytes()
        for path in (tmp_path / "part").rglob("*")
        if path.is_file()
    } == {
        path.relative_to(build / "0"): path.read_bytes()
        for path in (build / "0").rglob("*")
        if path.is_file()
    }


def test_a_repeated_push_publishes_nothing(store: Store, build: Path) -> None:
    report = push_build(build, store.url)
    assert (report.new, report.sent_bytes) == (False, 0)
    only_build(store)


def test_the_newest_build_of_a_job_is_first(store: Store, tmp_path: Path, signers: Signers) -> None:
    push_build(signed_build(tmp_path / "new.build", signers, content="new"), store.url)
    assert [each.id for each in builds_of(store, TARGET.job)] == ["00000002", "00000001"]


def test_a_build_without_a_signature_is_not_pushed(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="not signed"):
        push_build(made_build(tmp_path / "tiny.build"), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_gc_keeps_the_files_of_builds(store: Store) -> None:
    report = gc(store.url, grace=0)
    assert (report.removed_blobs, report.kept_blobs) == (0, 5)


def test_gc_keeps_the_last_builds_for_each_target_verdict_and_maker(
    store: Store, tmp_path: Path, signers: Signers
) -> None:
    other = TARGET.model_copy(update={"architecture": {**TARGET.architecture, "threads": 2}})
    made_build(tmp_path / "other.build", target=other, content="other")
    sign(tmp_path / "other.build", signers.alice.key, "alice")
    push_build(tmp_path / "other.build", store.url)
    unverified = made_build(tmp_path / "unverified.build", unverified=("train.only",))
    sign(unverified, signers.alice.key, "alice")
    bobs = made_build(tmp_path / "bobs.build", content="bob")
    sign(bobs, signers.bob.key, "bob")
    new = signed_build(tmp_path / "new.build", signers, content="new")
    for build in (bobs, new, unverified):
        push_build(build, store.url)
    gc(store.url, keep=1, grace=0)
    kept = [each.id for each in builds_of(store, TARGET.job)]
    assert kept == ["00000005", "00000004", "00000003", "00000002"]
    for stored in builds_of(store, TARGET.job):
        assert all(store.files.size(blob_path(e.sha256)) for e in stored.files.values())


def test_gc_of_a_line_keeps_all_builds(
    store: Store, tmp_path: Path, signers: Signers, packaged: Package
) -> None:
    push(packaged.path, store.url, line="gpt")
    push_build(signed_build(tmp_path / "new.build", signers, content="new"), store.url)
    gc(store.url, keep=1, lines=["gpt"], grace=0)
    assert len(list(builds_of(store, TARGET.job))) == 2


def test_a_build_that_is_no_longer_the_newest_can_be_pushed_again(
    store: Store, build: Path, tmp_path: Path, signers: Signers
) -> None:
    push_build(signed_build(tmp_path / "new.build", signers, content="new"), store.url)
    assert push_build(build, store.url).build == "00000003"


def test_a_push_that_gc_considered_dead_leaves_no_build(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(lease: PushedBlobs) -> None:
        if list((tmp_path / "store" / "builds").rglob("*.json")):
            raise StorageError("gc considered it dead")

    monkeypatch.setattr(PushedBlobs, "check", die)
    with pytest.raises(StorageError, match="dead"):
        push_build(build, tmp_path / "store")
    assert list(builds_of(Store(tmp_path / "store"), TARGET.job)) == []


def record_file(store: Store) -> Path:
    return Path(store.url) / "builds" / TARGET.job / "00000001.json"


def test_a_damaged_record_is_refused(store: Store) -> None:
    file = record_file(store)
    file.write_bytes(file.read_bytes().replace(b'"verified":true', b'"verified":false'))
    with pytest.raises(IntegrityError, match="checksum"):
        only_build(store)


def test_a_record_of_another_job_is_refused(store: Store) -> None:
    other = record_file(store).parent.with_name("b" * 64)
    record_file(store).parent.rename(other)
    with pytest.raises(IntegrityError, match="does not match its path"):
        list(builds_of(store, "b" * 64))


def test_files_that_the_build_does_not_list_are_refused(store: Store, tmp_path: Path) -> None:
    file = record_file(store)
    fields = parse_canonical(file.read_bytes(), "")
    del fields["checksum"], fields["files"]["0/kernels/abc.so"]
    fields["checksum"] = sha256_bytes(canonical_json(fields))
    file.write_bytes(canonical_json(fields))
    with pytest.raises(UnsafePackageError, match="not those of the build"):
        fetch_record(store, only_build(store), tmp_path)


def test_a_damaged_file_is_refused(store: Store, tmp_path: Path) -> None:
    record, _ = fetch_record(store, only_build(store), tmp_path)
    blob = Path(store.url) / blob_path(record.files["0/kernels/abc.so"].sha256)
    blob.chmod(0o644)
    blob.write_bytes(b"x" * blob.stat().st_size)
    (tmp_path / "part").mkdir()
    with pytest.raises(IntegrityError, match="differs from the published one"):
        fetch_part(store, record, 0, tmp_path / "part")
