"""Pull a release from a store: fetch missing files, and write the package atomically."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.core.canonical_json import sha256_bytes, sha256_file
from trainload.core.errors import IntegrityError, PackageError, StorageError, UnsafePackageError
from trainload.core.logs import log_handled, logged_suppress
from trainload.core.paths import link_or_copy, write_bytes
from trainload.core.storage.interface import NO_OPTIONS
from trainload.packaging.format.manifest import MAX_MANIFEST, Manifest
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_files import new_folder
from trainload.packaging.format.package_paths import MANIFEST, OUTSIDE
from trainload.packaging.package import check_tree, read_manifest
from trainload.packaging.stores.push import OnProgress, unwatched
from trainload.packaging.stores.store import Store, blob_path

_log = logging.getLogger(__name__)

Fetch = Callable[[FileEntry], Iterator[bytes]]
"""Yields the bytes of a listed file in blocks; they may be hostile."""


@dataclass(frozen=True, slots=True)
class PullReport:
    """Result of `pull`.

    `local_bytes` were on this machine already. Files with equal bytes count once.

    Law: bytes == fetched_bytes + local_bytes.
    """

    source: str
    line: str | None
    release: str
    path: Path
    digest: str
    files: int
    bytes: int
    fetched_files: int
    fetched_bytes: int
    local_bytes: int


def pull(
    store: str | Path,
    path: str | Path,
    *,
    line: str | None = None,
    release: str | int | None = None,
    debug: bool = True,
    reuse: Sequence[str | Path] = (),
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
) -> PullReport:
    """Pull a release as a package.

    Every byte is compared with its digest before the package appears.

    Files that sibling packages of `path` have already are not fetched: they are linked, where the
    file system can, after their digests were compared. So only changes are transferred.

    Args:
        store: a folder or fsspec URL.
        path: the package to write; a folder that does not exist.
        line: name of the line. None: the store's only line.
        release: number of the release, or "latest". None: the current release.
        debug: if True, include debug/.
        reuse: further local packages whose files may be reused.
        options: options for fsspec.
        on_progress: called with the numbers of finished and total bytes.

    Raises:
        StorageError: there is no such store, line or release; `path` is taken; or the disk is too
            full.
        IntegrityError: data in the store is damaged; nothing is left at `path`.
        UnsafePackageError: the store contains something that the format does not allow.
    """
    path = Path(path)
    source = Store(store, options)
    name = source.line(line)
    record = source.release(name, release)
    mark = source.mark_of(name, record.id)
    if mark is not None and mark.verdict == "removed":
        raise StorageError(
            "the release's files were removed",
            where=f"{source.url}, line {name}, release {record.name}",
            got=mark.reason,
        )
    files = {
        file: entry
        for file, entry in record.files.items()
        if debug or not file.startswith("debug/")
    }

    def fetch(entry: FileEntry) -> Iterator[bytes]:
        return source.files.receive(blob_path(entry.sha256), entry.size)

    fetched = write_pulled(path, files, fetch, reuse=reuse, on_progress=on_progress)
    return pull_report(source.url, name, record.name, path, files, fetched)


def pull_report(
    source: str,
    line: str | None,
    release: str,
    path: Path,
    files: Mapping[str, FileEntry],
    fetched: list[str],
) -> PullReport:
    """Count files and bytes of a pull."""
    blobs = {entry.sha256: entry.size for entry in files.values()}
    moved = {files[file].sha256: files[file].size for file in fetched}
    return PullReport(
        source=source,
        line=line,
        release=release,
        path=path,
        digest=files[MANIFEST].sha256,
        files=len(blobs),
        bytes=sum(blobs.values()),
        fetched_files=len(moved),
        fetched_bytes=sum(moved.values()),
        local_bytes=sum(blobs.values()) - sum(moved.values()),
    )


def write_pulled(
    path: Path,
    files: Mapping[str, FileEntry],
    fetch: Fetch,
    *,
    reuse: Sequence[str | Path] = (),
    on_progress: OnProgress = unwatched,
) -> list[str]:
    """Write a package of these files at `path` atomically.

    Args:
        path: a folder that does not exist.
        files: manifest.json, exactly the files that it lists, and files of debug/ and signatures/.
        fetch: fetches the bytes of a file.
        reuse: local packages whose files may be reused, in addition to the siblings of `path`.
        on_progress: called with the numbers of finished and total bytes.

    Returns:
        The files that were fetched.

    Raises:
        IntegrityError: fetched data does not have the size and digest of `files`.
        UnsafePackageError: `files` does not match the manifest.
        StorageError: `path` is taken, or the disk is too full.
    """
    if os.path.lexists(path):
        raise StorageError(
            "the path already exists",
            where=str(path),
            hint=(
                "Choose another path; files that packages in the same folder have are not fetched"
                " again."
            ),
        )
    manifest_bytes = fetch_listing(files, MANIFEST, MAX_MANIFEST, fetch)
    manifest = Manifest.from_bytes(manifest_bytes, MANIFEST)
    listed = {
        file: _digest_and_size(entry)
        for file, entry in files.items()
        if file != MANIFEST and file.split("/")[0] not in OUTSIDE
    }
    manifest_files = {file: _digest_and_size(entry) for file, entry in manifest.files.items()}
    if listed != manifest_files:
        wrong = sorted(
            file
            for file in {*listed, *manifest_files}
            if listed.get(file) != manifest_files.get(file)
        )
        raise UnsafePackageError(
            "the files of the release do not match its manifest",
            where=MANIFEST,
            got=", ".join(wrong[:5]),
        )
    local_files = _local_files(files, [*_sibling_packages(path), *map(Path, reuse)])
    total, done = sum(entry.size for entry in files.values()), 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    _check_disk_space(
        path, sum(entry.size for entry in files.values() if entry.sha256 not in local_files)
    )
    fetched = [MANIFEST]
    with new_folder(path) as root:
        write_bytes(root / MANIFEST, manifest_bytes)
        moved(len(manifest_bytes))
        written: dict[str, Path] = {}
        for file, entry in sorted(files.items()):
            if file == MANIFEST:
                continue
            target = root / file
            candidates = (
                [written[entry.sha256]]
                if entry.sha256 in written
                else local_files.get(entry.sha256, [])
            )
            if _link(candidates, target, entry):
                moved(entry.size)
            else:
                write_fetched(fetch(entry), target, entry, file, moved)
                fetched.append(file)
            written[entry.sha256] = target
        check_tree(root, manifest)
    return fetched


def _digest_and_size(entry: FileEntry) -> tuple[str, int]:
    return entry.sha256, entry.size


def fetch_listing(files: Mapping[str, FileEntry], name: str, most: int, fetch: Fetch) -> bytes:
    """Return the bytes of the file that lists the others.

    Args:
        files: the published files.
        name: path of that file.
        most: maximum size in bytes.
        fetch: fetches the bytes of a file.

    Raises:
        UnsafePackageError: it is too large.
        IntegrityError: it is damaged.
    """
    entry = files[name]
    if entry.size > most:
        raise UnsafePackageError(
            "a manifest is too large",
            where=name,
            expected=f"at most {most} bytes",
            got=str(entry.size),
        )
    data = bytearray()
    for block in fetch(entry):
        data += block
        if len(data) > entry.size:
            break
    if len(data) != entry.size or sha256_bytes(bytes(data)) != entry.sha256:
        raise _damaged_error(name, entry, len(data), sha256_bytes(bytes(data)))
    return bytes(data)


def write_fetched(
    blocks: Iterator[bytes], target: Path, entry: FileEntry, file: str, moved: Callable[[int], None]
) -> None:
    """Write a fetched file, sync it to disk, and compare it with its entry.

    At most the entry's size is written. `moved` is called with numbers of bytes.

    Raises:
        IntegrityError: it does not have the size and digest of its entry.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as write:
        for block in blocks:
            size += len(block)
            if size > entry.size:
                break
            digest.update(block)
            write.write(block)
            moved(len(block))
        write.flush()
        os.fsync(write.fileno())
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise _damaged_error(file, entry, size, digest.hexdigest())


def _damaged_error(file: str, entry: FileEntry, size: int, digest: str) -> IntegrityError:
    return IntegrityError(
        "a fetched file differs from the published one",
        where=file,
        expected=f"{entry.size} bytes of sha256 {entry.sha256}",
        got=f"{'more' if size > entry.size else size} bytes of sha256 {digest}",
        hint="The stored file is damaged: remove it, and push an intact copy of the package again.",
    )


def _link(candidates: Sequence[Path], target: Path, entry: FileEntry) -> bool:
    """Link or copy a local file to `target`.

    Return False if none of them has the right bytes any more.
    """
    for source in candidates:
        message = f"{source} cannot be reused; fetching its bytes"
        with logged_suppress(_log, message, OSError, level=logging.DEBUG):
            link_or_copy(source, target)
            if target.stat().st_size == entry.size and sha256_file(target) == entry.sha256:
                return True
        target.unlink(missing_ok=True)
    return False


def _sibling_packages(path: Path) -> Iterator[Path]:
    """Yield the packages next to `path`, including unfinished ones of killed pulls."""
    with suppress(OSError):
        yield from sorted(
            sibling
            for sibling in path.absolute().parent.iterdir()
            if (sibling / MANIFEST).is_file()
        )


def _local_files(files: Mapping[str, FileEntry], packages: Iterable[Path]) -> dict[str, list[Path]]:
    """Return digest -> files of local packages that may have these bytes.

    Files are matched by the packages' manifests or, outside of these, by path and size. Unreadable
    ones are left out. The caller compares digests before it uses a file.
    """
    sizes = {entry.sha256: entry.size for entry in files.values()}
    outside = {file: entry.sha256 for file, entry in files.items() if file.split("/")[0] in OUTSIDE}
    candidates: dict[str, list[Path]] = {}
    for package in packages:
        try:
            entries = Manifest.from_bytes(read_manifest(package), MANIFEST).files
        except (PackageError, StorageError) as error:
            log_handled(_log, f"{package} cannot be reused", error, level=logging.DEBUG)
            continue
        for file, digest in (
            *((file, entry.sha256) for file, entry in entries.items()),
            *outside.items(),
        ):
            place = package / file
            with suppress(OSError):  # another process may be removing the package
                if (
                    digest in sizes
                    and not place.is_symlink()
                    and place.is_file()
                    and place.stat().st_size == sizes[digest]
                ):
                    candidates.setdefault(digest, []).append(place)
    return candidates


def _check_disk_space(path: Path, count: int) -> None:
    parent = path.absolute().parent
    if not parent.is_dir():
        raise StorageError("there is no such folder", where=str(parent), hint="Create it first.")
    free = shutil.disk_usage(parent).free
    if free < count:
        raise StorageError(
            "there is not enough disk space",
            where=str(parent),
            expected=f"{count} bytes",
            got=f"{free} bytes free",
        )
