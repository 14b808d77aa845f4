"""A package as a plain folder at a URL: its files under their own names, the manifest sent last.

Unlike a store it has no releases and shares no files; it is where a run without a shared file
system puts its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import StorageError
from trainload.core.storage.interface import Expected, StoreFiles
from trainload.core.storage.open_files import open_bounded
from trainload.packaging.format.manifest import MAX_MANIFEST, Manifest
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_paths import MANIFEST, SIGNATURES
from trainload.packaging.stores.pull import PullReport, pull_report, write_pulled
from trainload.packaging.stores.push import OnProgress, local_package, unwatched

_MOST_SIGNATURE_BYTES = 2**20
_PROBE = "probe"


def manifest_at(url: str) -> bytes | None:
    """Return the manifest of the package at a URL; None if there is none.

    Raises:
        StorageError: the URL cannot be reached.
        UnsafePackageError: it is too large.
    """
    return open_bounded(url).read(MANIFEST, MAX_MANIFEST)


def digest_at(url: str) -> str | None:
    """Return the digest of the package at a URL; None if there is none. Errors: `manifest_at`."""
    manifest = manifest_at(url)
    return None if manifest is None else sha256_bytes(manifest)


def check_writable_url(url: str) -> None:
    """Check that a package can be written at a URL.

    Raises:
        StorageError: it cannot.
    """
    files = open_bounded(url)
    files.replace(_PROBE, b"\0")
    files.delete(_PROBE)


def send_package(package: Path, url: str) -> None:
    """Send a package without debug/; it appears, complete, when this returns.

    Raises:
        StorageError: the URL cannot be written.
        PackageError: the package is damaged.
    """
    local, files = local_package(package, debug=False), open_bounded(url)
    for path in sorted(local.files, key=lambda path: (path == MANIFEST, path)):
        entry = local.files[path]
        expected = Expected(entry.size, entry.sha256)
        files.send(path, package / path, expected, lambda count: None)


def fetch_package(
    url: str,
    path: Path,
    *,
    reuse: Sequence[str | Path] = (),
    on_progress: OnProgress = unwatched,
) -> PullReport:
    """Fetch the package at a URL, without debug/. Every byte is checked before the package appears.

    Signatures are fetched if the server lists the files of a folder.

    Args:
        url: its URL.
        path: a folder that does not exist.
        reuse: further local packages whose files may be reused.
        on_progress: called with the numbers of finished and total bytes.

    Raises:
        StorageError: there is no package, or the URL cannot be reached.
        IntegrityError: a file is missing or damaged.
        UnsafePackageError: the manifest is not valid.
    """
    files, data = open_bounded(url), manifest_at(url)
    if data is None:
        raise StorageError("there is no package here", where=url, expected=f"a {MANIFEST}")
    manifest = Manifest.from_bytes(data, MANIFEST)
    json = FileEntry(media_type="application/json", sha256=sha256_bytes(data), size=len(data))
    entries = {MANIFEST: json, **manifest.files, **_signatures(files)}
    paths = {entry.sha256: path for path, entry in entries.items()}

    def fetch(entry: FileEntry) -> Iterator[bytes]:
        return files.receive(paths[entry.sha256], entry.size)

    fetched = write_pulled(path, entries, fetch, reuse=reuse, on_progress=on_progress)
    return pull_report(files.url, None, "", path, entries, fetched)


def _signatures(files: StoreFiles) -> dict[str, FileEntry]:
    """Return the signatures of a package, which its manifest does not list."""
    found = {}
    for name in files.names(SIGNATURES):
        path = f"{SIGNATURES}/{name}"
        data = files.read(path, _MOST_SIGNATURE_BYTES)
        if data is not None:
            found[path] = FileEntry(
                media_type="application/json", sha256=sha256_bytes(data), size=len(data)
            )
    return found
