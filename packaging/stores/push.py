"""Push a package to a store: send missing files, then publish the release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.canonical_json import sha256_bytes, sha256_file
from trainload.core.errors import PackageError, StorageError
from trainload.core.storage.interface import NO_OPTIONS, Expected
from trainload.core.storage.places import path_here
from trainload.packaging.format.assets import media_type_of
from trainload.packaging.format.field_types import SafePath
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_files import walk
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.package import check_tree, read_manifest
from trainload.packaging.stores.leases import PushedBlobs, leased
from trainload.packaging.stores.releases import TRAVELLING, Release, Verdict, check_files, shown
from trainload.packaging.stores.store import Store, blob_path

FIRST_LINE = "main"
"""The line of an empty store, unless another is named."""

OnProgress = Callable[[int, int], None]
"""Callback with the numbers of finished and total bytes."""


def unwatched(_done: int, _total: int) -> None:
    """Ignore progress: the default of `on_progress`."""


@dataclass(frozen=True, slots=True)
class LocalPackage:
    """The files of a package that will be published, by path, with sizes and digests."""

    path: Path
    digest: str
    manifest: Manifest
    files: Mapping[str, FileEntry]


@dataclass(frozen=True, slots=True)
class PushReport:
    """Result of `push`.

    `present_bytes` were in the store already. Files with equal bytes count once.

    Law: bytes == sent_bytes + present_bytes.

    `new` is False if the line had this package already, so that no release was published. `current`
    is the line's current release after the push.
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
    """List the files of a package. Large files are not read.

    Args:
        path: the package's folder.
        debug: if True, include debug/.

    Raises:
        StorageError: there is no package.
        PackageError: the package is incomplete or not safe.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise StorageError(
            "there is no package here", where=str(path), expected=f"a folder with {MANIFEST}"
        )
    data = read_manifest(path)
    manifest = Manifest.from_bytes(data, MANIFEST)
    check_tree(path, manifest)
    digest = sha256_bytes(data)
    files = {
        MANIFEST: FileEntry(media_type="application/json", sha256=digest, size=len(data)),
        **manifest.files,
    }
    folders = TRAVELLING if debug else ("signatures",)
    for file, status in walk(path):
        if file.split("/")[0] in folders and "/" in file:
            files[file] = FileEntry(
                media_type=media_type_of(file), sha256=sha256_file(path / file), size=status.st_size
            )
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
    """Publish a package as a release of a line.

    Only files that the store lacks are sent, so a repeated push resumes.

    Args:
        package: the package's folder.
        store: a folder or fsspec URL; a store is created if it is empty.
        line: name of the line. None: the store's only line, or "main" in an empty store.
        promote: if True, the release becomes the line's current one.
        only_if: promote only if this release is current now ("none": if none is); otherwise the
            release is published but not promoted.
        rejected: reason why the release must not be used; it is published as rejected, and not
            promoted.
        message: message that the list of releases shows.
        facts: names and values that are stored with the release: metrics, the snapshot of the data.
        debug: if True, include debug/.
        options: options for fsspec.
        on_progress: called with the numbers of finished and total bytes.
        on_wait: called with a text that says what the push waits for.

    Raises:
        StorageError: there is no package, or the store cannot be reached or written.
        PackageError: the package is damaged; nothing was published.
        ConflictError: another release than `only_if` is current; the release was published.
    """
    local = local_package(path_here(package), debug=debug)
    target = Store(store, options, create=True)
    name = target.line(line, default=FIRST_LINE)
    promote = promote and rejected is None
    if only_if is not None and not promote:
        raise StorageError(
            "a condition on the current release requires promotion",
            where="only_if",
            hint="Omit only_if, or promote the release.",
        )
    blobs = {entry.sha256: entry.size for entry in local.files.values()}
    with leased(target, blobs, on_wait) as lease:
        sent = send_blobs(target, local.path, local.files, lease, on_progress)
        lease.check()
        verdict: Verdict = "candidate" if rejected is None else "rejected"
        release, new = target.publish(
            name,
            local.manifest,
            local.digest,
            local.files,
            verdict=verdict,
            reason=rejected or "",
            message=message,
            facts=facts,
        )
        _check_not_withdrawn(target, release, lease)
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
    """Make the release current unless it is, so that a repeated push adds no entry."""
    pointer = store.current(release.line)
    if pointer is None or pointer.release != release.id:
        store.promote(release.line, release.name, only_if=only_if, reason=reason)


def _check_not_withdrawn(store: Store, release: Release, lease: PushedBlobs) -> None:
    """Withdraw the release and raise if gc declared this push dead before the release appeared."""
    try:
        lease.check()
    except StorageError:
        store.mark(release.line, release.name, "removed", "gc considered its push dead")
        raise


def send_blobs(
    store: Store,
    root: Path,
    files: Mapping[str, FileEntry],
    lease: PushedBlobs,
    on_progress: OnProgress,
) -> list[str]:
    """Send the files below `root` that the store lacks. Return their digests."""
    blobs: dict[str, tuple[str, FileEntry]] = {}
    for path, entry in files.items():
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
    stored_sizes = store.blob_sizes(blobs)
    for digest, (path, entry) in blobs.items():
        if stored_sizes[digest] == entry.size:
            moved(entry.size)
            continue
        store.files.send(blob_path(digest), root / path, Expected(entry.size, entry.sha256), moved)
        sent.append(digest)
    on_progress(total, total)
    return sent


def _check_safe(file: str, package: Path) -> None:
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(SafePath).validate_python(file)
    except ValidationError as error:
        raise PackageError(
            "a file has a name that cannot be pushed",
            where=f"{package}/{file}",
            hint="Rename or remove it.",
        ) from error
