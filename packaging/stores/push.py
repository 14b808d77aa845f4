"""Publishing a package in a store: what it lacks is sent, then the release appears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.canonical_json import sha256_bytes, sha256_file
from trainload.core.errors import PackageError, StorageError
from trainload.core.storage.interface import NO_OPTIONS, Expected
from trainload.packaging.format.assets import media_type_of
from trainload.packaging.format.manifest import MANIFEST, FileEntry, Manifest, SafePath
from trainload.packaging.format.package_files import walk
from trainload.packaging.package import check_tree, read_manifest
from trainload.packaging.stores.leases import PushedBlobs, leased
from trainload.packaging.stores.releases import TRAVELLING, Release, Verdict, check_files, shown
from trainload.packaging.stores.store import Store, blob_path

FIRST_LINE = "main"
"""The line of an empty store, unless another is named."""

OnProgress = Callable[[int, int], None]
"""Told how many bytes of how many are where they belong."""


def unwatched(_done: int, _total: int) -> None:
    """For callers that do not watch."""


@dataclass(frozen=True, slots=True)
class LocalPackage:
    """A package's files as they will be published: everything that travels, by path, with sizes and digests."""

    path: Path
    digest: str
    manifest: Manifest
    files: Mapping[str, FileEntry]


@dataclass(frozen=True, slots=True)
class PushReport:
    """What `push` did. `sent_*` moved; `present_bytes` were in the store already. Files of equal bytes count once.

    Law: bytes == sent_bytes + present_bytes.

    `new`: whether a release was published; not where the line has this very package. `current`: the line's current release now.
    """

    store: str
    line: str
    release: str
    digest: str
    new: bool
    promoted: bool
    current: str | None
    files: int
    bytes: int
    sent_files: int
    sent_bytes: int
    present_bytes: int


def local_package(path: Path, *, debug: bool = True) -> LocalPackage:
    """Read what a package holds. Its large files are not read.

    Args:
        path: its folder.
        debug: whether debug/ travels.

    Raises:
        StorageError: there is no package.
        PackageError: it is not whole, or not safe.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise StorageError("there is no package here", where=str(path), expected=f"a folder with {MANIFEST}")
    data = read_manifest(path)
    manifest = Manifest.from_bytes(data, MANIFEST)
    check_tree(path, manifest)
    digest = sha256_bytes(data)
    files = {MANIFEST: FileEntry(media_type="application/json", sha256=digest, size=len(data)), **manifest.files}
    wanted = TRAVELLING if debug else ("signatures",)
    for file, status in walk(path):
        if file.split("/")[0] in wanted and "/" in file:
            files[file] = FileEntry(media_type=media_type_of(file), sha256=sha256_file(path / file), size=status.st_size)
    check_files(files, str(path))
    for file in files:
        _check_safe(file, path)
    return LocalPackage(path, digest, manifest, dict(sorted(files.items())))


def push(
    package: str | Path,
    store: str | Path,
    *,
    line: str | None = None,
    promote: bool = True,
    only_if: str | int | None = None,
    rejected: str | None = None,
    message: str = "",
    facts: Mapping[str, bool | int | float | str] | None = None,
    debug: bool = True,
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
    on_wait: Callable[[str], None] = lambda _text: None,
) -> PushReport:
    """Publish a package as a release of a line. Only files that the store lacks are sent; a push that was broken off goes on there.

    Args:
        package: its folder.
        store: a folder or fsspec URL; it becomes a store if there is nothing yet.
        line: which line. None: the store's only one, or "main" in an empty store.
        promote: whether the release becomes the line's current one.
        only_if: promote only if this release is current now ("none": if none is); otherwise the release is published and not promoted.
        rejected: why the release must not be used; it is published as rejected, and not promoted.
        message: one for who reads the list of releases.
        facts: names and values that are kept with it: metrics, the data's snapshot.
        debug: whether debug/ travels.
        options: for fsspec.
        on_progress: told of bytes.
        on_wait: told what is waited for.

    Raises:
        StorageError: there is no package, or the store cannot be reached or written.
        PackageError: the package is damaged; nothing was published.
        ConflictError: another release is current than `only_if` says; the release was published.
    """
    local = local_package(Path(package), debug=debug)
    target = Store(store, options, create=True)
    name = target.line(line, default=FIRST_LINE)
    promote = promote and rejected is None
    if only_if is not None and not promote:
        raise StorageError("a condition on what is current goes with promoting", where="only_if", hint="Leave one of the two out.")
    blobs = {entry.sha256: entry.size for entry in local.files.values()}
    with leased(target, blobs, on_wait) as lease:
        sent = _send(target, local, lease, on_progress)
        lease.check()
        verdict: Verdict = "candidate" if rejected is None else "rejected"
        release, new = target.publish(
            name, local.manifest, local.digest, local.files, verdict=verdict, reason=rejected or "", message=message, facts=facts
        )
        _check_whole(target, release, lease)
    if promote:
        _promote(target, release, only_if, message)
    pointer = target.current(name)
    sent_bytes = sum(blobs[digest] for digest in sent)
    return PushReport(
        store=target.url,
        line=name,
        release=release.name,
        digest=local.digest,
        new=new,
        promoted=promote,
        current=shown(pointer.release) if pointer else None,
        files=len(blobs),
        bytes=sum(blobs.values()),
        sent_files=len(sent),
        sent_bytes=sent_bytes,
        present_bytes=sum(blobs.values()) - sent_bytes,
    )


def _promote(store: Store, release: Release, only_if: str | int | None, reason: str) -> None:
    """Make the release current, unless it is: a push that was repeated says the same once."""
    pointer = store.current(release.line)
    if pointer is None or pointer.release != release.id:
        store.promote(release.line, release.name, only_if=only_if, reason=reason)


def _check_whole(store: Store, release: Release, lease: PushedBlobs) -> None:
    """Check that gc did not take this push for dead just before its release appeared; withdraw the release if it did."""
    try:
        lease.check()
    except StorageError:
        store.mark(release.line, release.name, "removed", "gc took its push for dead")
        raise


def _send(store: Store, local: LocalPackage, lease: PushedBlobs, on_progress: OnProgress) -> list[str]:
    """Send the blobs that are not there. Returns: their digests."""
    blobs: dict[str, tuple[str, FileEntry]] = {}
    for path, entry in local.files.items():
        blobs.setdefault(entry.sha256, (path, entry))
    total = sum(entry.size for _, entry in blobs.values())
    done = 0
    sent: list[str] = []

    def moved(count: int) -> None:
        nonlocal done
        done += count
        lease.renew()
        on_progress(done, total)

    on_progress(0, total)
    there = store.blob_sizes(blobs)
    for digest, (path, entry) in blobs.items():
        if there[digest] == entry.size:
            moved(entry.size)
            continue
        store.files.send(blob_path(digest), local.path / path, Expected(entry.size, entry.sha256), moved)
        sent.append(digest)
    on_progress(total, total)
    return sent


def _check_safe(file: str, package: Path) -> None:
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(SafePath).validate_python(file)
    except ValidationError as error:
        raise PackageError("a file has a name that cannot travel", where=f"{package}/{file}", hint="Rename or remove it.") from error
