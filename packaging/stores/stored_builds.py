"""Builds in a store: compiled graphs of a job, beside the releases of its package.

A build is found by its job (`Target.job`), which does not depend on weights: every release of a
line that was only retrained has the same builds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trainload.core.canonical_json import canonical_json, sha256_bytes, sha256_file
from trainload.core.errors import (
    IntegrityError,
    PackageError,
    StorageError,
    UnsafePackageError,
)
from trainload.core.paths import write_bytes
from trainload.core.records import MAX_RECORD, Nonce, Sealed, Time, now
from trainload.core.storage.interface import NO_OPTIONS
from trainload.packaging.builds.build_folder import check_build
from trainload.packaging.builds.build_record import BUILD_FILE, BuildRecord, Target
from trainload.packaging.format.field_types import SafePath, Sha256
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_paths import SIGNATURES
from trainload.packaging.signatures.signature_file import (
    MAX_SIGNATURE,
    MAX_SIGNATURES,
    signature_paths,
)
from trainload.packaging.stores.leases import leased
from trainload.packaging.stores.pull import fetch_listing, write_fetched
from trainload.packaging.stores.push import OnProgress, send_blobs, unwatched
from trainload.packaging.stores.releases import ReleaseId, check_paths
from trainload.packaging.stores.store import Store, blob_path

BUILDS = "builds"
_SIGNATURE_TYPE = "application/json"
_READERS = 8


class StoredBuild(Sealed):
    """builds/JOB/ID.json: a build that was pushed.

    Attributes:
        job: the build's job.
        id: name of the record's file.
        target: what the graphs fit.
        verified: True if a device of the architecture has compared all graphs.
        files: build.json, every file that it lists, and those of signatures/.
        created: time of the push in UTC.
        nonce: 16 random bytes in hex.
    """

    job: Sha256
    id: ReleaseId
    target: Target
    verified: bool
    files: Annotated[dict[SafePath, FileEntry], Field(max_length=100_000)]
    created: Time
    nonce: Nonce

    @property
    def kind(self) -> tuple[str, bool, tuple[str, ...]]:
        """Properties that a newer build must share to replace this one: target, verdict, and names
        of signatures.
        """
        return _kind(self.target, self.files, verified=self.verified)

    @property
    def digest(self) -> str:
        """Hash of all files of the build, signatures included."""
        return sha256_bytes(canonical_json({f: e.sha256 for f, e in self.files.items()}))


@dataclass(frozen=True, slots=True)
class BuildPushReport:
    """Result of `push_build`.

    Attributes:
        store: URL of the store.
        job: job of the build, by which stores have builds.
        build: id of the build within its job.
        new: False if the store had it already.
        verified: True if a device of the architecture has compared all graphs.
        bytes: total size of the files.
        sent_files: number of the files that were sent.
        sent_bytes: their size.
    """

    store: str
    job: str
    build: str
    new: bool
    verified: bool
    bytes: int
    sent_files: int
    sent_bytes: int


def push_build(
    build: Path,
    store: str | Path,
    *,
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
    on_wait: Callable[[str], None] = lambda _text: None,
) -> BuildPushReport:
    """Publish a signed build.

    Args:
        build: the build's folder.
        store: a folder or fsspec URL; a store is created if it is empty.
        options: options for fsspec.
        on_progress: called with the numbers of finished and total bytes.
        on_wait: called with a text that says what the push waits for.

    Raises:
        PackageError: the build is damaged, or not signed; nothing was published.
        StorageError: there is no build, or the store cannot be reached or written.
    """
    record, digest = check_build(build)
    signatures = signature_paths(build)
    if not signatures:
        raise PackageError(
            "the build is not signed, so nobody would load it",
            where=str(build),
            hint="Sign it: trainload sign.",
        )
    files = {
        BUILD_FILE: FileEntry(
            media_type="application/json", sha256=digest, size=(build / BUILD_FILE).stat().st_size
        ),
        **record.files,
        **{
            path: FileEntry(
                media_type=_SIGNATURE_TYPE,
                sha256=sha256_file(build / path),
                size=(build / path).stat().st_size,
            )
            for path in signatures
        },
    }
    target = Store(store, options, create=True)
    blobs = {entry.sha256: entry.size for entry in files.values()}
    with leased(target, blobs, on_wait) as lease:
        sent = send_blobs(target, build, files, lease, on_progress)
        lease.check()
        stored, is_new = _publish(target, record, dict(sorted(files.items())))
        try:
            lease.check()
        except StorageError:  # gc considered this push dead before the record appeared
            remove_build(target, stored)
            raise
    return BuildPushReport(
        store=target.url,
        job=stored.job,
        build=stored.id,
        new=is_new,
        verified=stored.verified,
        bytes=sum(blobs.values()),
        sent_files=len(sent),
        sent_bytes=sum(blobs[each] for each in sent),
    )


def _publish(
    store: Store, record: BuildRecord, files: dict[str, FileEntry]
) -> tuple[StoredBuild, bool]:
    """Publish the record of a build unless it is the newest of its kind, which gc keeps.

    Returns:
        The record, and True if it is new.
    """
    nonce = secrets.token_hex(16)

    def make(name: str, _last: str | None) -> StoredBuild:
        return StoredBuild(
            job=record.target.job,
            id=name,
            target=record.target,
            verified=record.is_verified,
            files=files,
            created=now(),
            nonce=nonce,
        )

    kind = _kind(record.target, files, verified=record.is_verified)
    for stored in builds_of(store, record.target.job, lambda _: None):
        if stored.kind == kind:
            if stored.files == files:
                return stored, False
            break
    return store.append(_folder(record.target.job), make), True


def builds_of(
    store: Store, job: str, skipped: Callable[[str], None] | None = None
) -> Iterator[StoredBuild]:
    """Yield the builds of a job, newest first.

    Args:
        store: the store.
        job: the job.
        skipped: called with the error of each record that cannot be read, which is left out. None:
            the error is raised.

    Raises:
        IntegrityError: a record is damaged.
        UnsafePackageError: a record contains what the format does not allow.
    """
    for name in reversed(store.record_ids(_folder(job))):
        path = f"{_folder(job)}/{name}.json"
        try:
            stored = _read(store, path, job, name)
        except PackageError as error:
            if skipped is None:
                raise
            skipped(str(error))
            continue
        if stored is not None:  # otherwise gc has removed it
            yield stored


def _read(store: Store, path: str, job: str, name: str) -> StoredBuild | None:
    stored = store.read_record(StoredBuild, path)
    if stored is None:
        return None
    where = f"{store.url}/{path}"
    if (stored.job, stored.target.job, stored.id) != (job, job, name):
        raise IntegrityError("a record of the store does not match its path", where=where)
    check_paths(stored.files, where)
    signatures = _signatures(stored.files)
    largest = max((stored.files[file].size for file in signatures), default=0)
    if len(signatures) > MAX_SIGNATURES or largest > MAX_SIGNATURE:
        raise UnsafePackageError("the signatures of a build are too many or too large", where=where)
    return stored


def jobs_with_builds(store: Store) -> tuple[str, ...]:
    """Return the jobs that have builds in a store, sorted."""
    return tuple(store.files.names(BUILDS))


def remove_build(store: Store, stored: StoredBuild) -> None:
    """Remove the record of a build; gc then removes its files."""
    store.files.delete(f"{_folder(stored.job)}/{stored.id}.json")


def fetch_record(store: Store, stored: StoredBuild, folder: Path) -> tuple[BuildRecord, str]:
    """Fetch the record and the signatures of a build, which say whether it may be loaded.

    Args:
        store: the store.
        stored: the build.
        folder: an empty folder, to which they are written.

    Returns:
        The record, and the sha256 of its bytes.

    Raises:
        IntegrityError: stored data is damaged.
        UnsafePackageError: the stored files are not those of the build.
    """
    where = f"{store.url}/{_folder(stored.job)}/{stored.id}.json"
    signatures = _signatures(stored.files)
    if BUILD_FILE not in stored.files:
        raise UnsafePackageError("a build has no build.json", where=where)
    data = fetch_listing(stored.files, BUILD_FILE, MAX_RECORD, _fetch_from(store))
    record = BuildRecord.from_bytes(data, f"{where}, {BUILD_FILE}")
    if record.target != stored.target or record.files != {
        file: entry
        for file, entry in stored.files.items()
        if file != BUILD_FILE and file not in signatures
    }:
        raise UnsafePackageError("the stored files are not those of the build", where=where)
    write_bytes(folder / BUILD_FILE, data)
    _fetch(store, {file: stored.files[file] for file in signatures}, folder)
    return record, sha256_bytes(data)


def fetch_part(store: Store, record: BuildRecord, index: int, folder: Path) -> None:
    """Fetch the graphs of the ranks with an index on the pipeline axis.

    Args:
        store: the store.
        record: the build's record.
        index: the index.
        folder: an empty folder, to which the files are written.

    Raises:
        IntegrityError: stored data is damaged.
    """
    prefix = f"{index}/"
    files = {
        file.removeprefix(prefix): entry
        for file, entry in record.files.items()
        if file.startswith(prefix)
    }
    _fetch(store, files, folder)


def build_blobs(stored: Collection[StoredBuild]) -> set[str]:
    """Return the digests of the blobs of builds."""
    return {entry.sha256 for each in stored for entry in each.files.values()}


def _fetch(store: Store, files: Mapping[str, FileEntry], folder: Path) -> None:
    fetch = _fetch_from(store)

    def write(file: str) -> None:
        write_fetched(fetch(files[file]), folder / file, files[file], file, lambda _: None)

    with ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(write, files):  # raises the error of a file
            pass


def _fetch_from(store: Store) -> Callable[[FileEntry], Iterator[bytes]]:
    return lambda entry: store.files.receive(blob_path(entry.sha256), entry.size)


def _kind(
    target: Target, files: Collection[str], *, verified: bool
) -> tuple[str, bool, tuple[str, ...]]:
    return target.key, verified, tuple(_signatures(files))


def _signatures(files: Collection[str]) -> list[str]:
    """Return the paths of signatures among the files of a build, sorted."""
    return sorted(file for file in files if file.startswith(f"{SIGNATURES}/"))


def _folder(job: str) -> str:
    return f"{BUILDS}/{job}"
