"""Fetch packages from a store or registry: once per node, into its cache, for all of its processes.

A package that is a plain folder at a URL is named by the URL. A release is named
STORE#LINE/RELEASE; STORE is a folder or fsspec URL. LINE may be omitted if the store has only one,
and /RELEASE for the current release. An artifact of a registry is named
oci://HOST/NAME:TAG, or with @sha256:DIGEST. A run records the immutable name, with the release's
number or the artifact's digest.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import IntegrityError
from trainload.core.storage.places import is_url
from trainload.launching.node.cache import (
    LOCK_SECONDS,
    default_cache_dir,
    make_room,
    private_folder,
    use,
)
from trainload.packaging.derived import share_derived
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.package import read_manifest
from trainload.packaging.stores.oci import pin_oci, pull_oci
from trainload.packaging.stores.package_at_url import digest_at, fetch_package
from trainload.packaging.stores.pull import pull
from trainload.packaging.stores.push import OnProgress, unwatched
from trainload.packaging.stores.references import is_oci, is_reference, parts_of
from trainload.packaging.stores.store import Store


def pinned(reference: str) -> tuple[str, str]:
    """Return the immutable name of a referenced package, and the package's digest.

    Raises:
        StorageError: the store is not reachable, or there is no such store, line, release or
            artifact.
        IntegrityError: a record in the store is damaged.
    """
    if is_oci(reference):
        return pin_oci(reference)
    if _is_url_alone(reference) and (found := digest_at(reference)) is not None:
        return reference.rstrip("/"), found
    url, line, number = parts_of(reference)
    store = Store(url)
    name = store.line(line)
    release = store.release(name, number)
    return f"{store.url}#{name}/{release.name}", release.package


def fetched(
    reference: str, cache: Path, digest: str, *, on_progress: OnProgress = unwatched
) -> Path:
    """Return the folder of a package in the node's cache; the node's first process fetches it, and
    checks every byte.

    Args:
        reference: name of the package, as returned by `pinned`.
        cache: the node's cache.
        digest: digest of the package.
        on_progress: called with the number of bytes.

    Raises:
        StorageError: the store is not reachable, the package no longer exists, or the disk is full.
        IntegrityError: the received package is damaged, or is another package.
    """
    root = private_folder(cache / "packages")
    # A package's digest does not cover its signatures, so the reference is also part of the key.
    folder = root / f"{digest}-{sha256_bytes(reference.encode())[:16]}"
    use(folder)
    if _has_package(folder, digest):
        return folder
    with FileLock(folder.with_suffix(".lock"), timeout=LOCK_SECONDS):
        if _has_package(folder, digest):
            return folder
        make_room(cache)
        _, pinned_digest = pinned(reference)
        if pinned_digest != digest:
            raise IntegrityError(
                "this is not the package that the run was launched with",
                where=reference,
                expected=digest,
                got=pinned_digest,
            )
        if is_oci(reference):
            pull_oci(reference, folder, on_progress=on_progress)
        elif _is_url_alone(reference):
            fetch_package(reference, folder, on_progress=on_progress)
        else:
            url, line, number = parts_of(reference)
            pull(url, folder, line=line, release=number, on_progress=on_progress)
        program = Manifest.from_bytes(read_manifest(folder), MANIFEST).program_digest
        share_derived(
            folder,
            program,
            (other for other in root.iterdir() if other.is_dir() and other != folder),
        )
    return folder


def _is_url_alone(reference: str) -> bool:
    """Return True if a reference has no line: it may name a package at a URL."""
    return is_url(reference) and "#" not in reference


def here(name: str | Path, *, on_progress: OnProgress = unwatched) -> tuple[str | None, Path]:
    """Return a package's immutable name (None if it is a local folder) and its folder on this
    machine, after fetching it.

    The errors are those of `pinned` and `fetched`.
    """
    if not is_reference(name):
        return None, Path(name)
    source, digest = pinned(str(name))
    return source, fetched(source, default_cache_dir(), digest, on_progress=on_progress)


def _has_package(folder: Path, digest: str) -> bool:
    """Return True if the cache has a package; raise IntegrityError if its manifest has changed.

    Files are checked when read.
    """
    if not (folder / MANIFEST).is_file():
        return False
    cached_digest = sha256_bytes(read_manifest(folder))
    if cached_digest != digest:
        raise IntegrityError(
            "a package in the cache has changed since it was fetched",
            where=str(folder),
            expected=digest,
            got=cached_digest,
            hint="Remove this folder; the package is then fetched again.",
        )
    return True
