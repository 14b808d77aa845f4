"""Packages that lie in a store or registry: each node fetches one once, into its cache, and all of its processes use that.

A release is named STORE#LINE/RELEASE, where LINE may be left out if the store has one, and /RELEASE if it is the current one; STORE is a
folder or fsspec URL. An artifact of a registry is named oci://HOST/NAME:TAG, or with @sha256:DIGEST. What a run keeps is the name with the
release's number, or the artifact's digest: it means the same tomorrow.
"""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import IntegrityError, StorageError
from trainload.launching.node.cache import LOCK_SECONDS, default_cache_dir, make_room, private_folder, use
from trainload.packaging.derived import share_derived
from trainload.packaging.format.manifest import MANIFEST, Manifest
from trainload.packaging.package import read_manifest
from trainload.packaging.stores.oci import is_oci, pin_oci, pull_oci
from trainload.packaging.stores.pull import pull
from trainload.packaging.stores.push import OnProgress, unwatched
from trainload.packaging.stores.store import Store


def is_reference(name: str | Path) -> bool:
    """Whether this names a package in a store or registry, and not a folder of this machine's."""
    text = str(name)
    return is_oci(text) or (isinstance(name, str) and ("://" in text or ("#" in text and not Path(text).exists())))


def run_name(package: str) -> str:
    """What a run of a package is called, where nobody says: after the package, its line, or its artifact."""
    if not is_reference(package):
        return Path(package).stem
    url, _, rest = package.partition("#")
    return rest.partition("/")[0] or url.partition("@")[0].rpartition("/")[2].partition(":")[0]


def pinned(reference: str) -> tuple[str, str]:
    """A name that means the same tomorrow, and the digest of its package.

    Raises:
        StorageError: the place cannot be reached, or there is no such store, line, release or artifact.
        IntegrityError: a record of it is damaged.
    """
    if is_oci(reference):
        return pin_oci(reference)
    url, line, number = parts_of(reference)
    store = Store(url)
    name = store.line(line)
    release = store.release(name, number)
    return f"{store.url}#{name}/{release.name}", release.package


def fetched(reference: str, cache: Path, digest: str, *, on_progress: OnProgress = unwatched) -> Path:
    """The folder of a package, in a node's cache; fetched by the first of its processes, every byte compared with its digest.

    Args:
        reference: its name, as `pinned` gives it.
        cache: the node's cache.
        digest: the package's.
        on_progress: told of bytes.

    Raises:
        StorageError: the place cannot be reached, there is no such package any more, or the disk has no room.
        IntegrityError: what came is damaged, or another package.
    """
    root = private_folder(cache / "packages")
    # Signatures are outside of a package's digest, so its name is part of what it is found by.
    folder = root / f"{digest}-{sha256_bytes(reference.encode())[:16]}"
    use(folder)
    if _is_there(folder, digest):
        return folder
    with FileLock(folder.with_suffix(".lock"), timeout=LOCK_SECONDS):
        if _is_there(folder, digest):
            return folder
        make_room(cache)
        _, found = pinned(reference)
        if found != digest:
            raise IntegrityError("the package is another one than the run was launched with", where=reference, expected=digest, got=found)
        if is_oci(reference):
            pull_oci(reference, folder, on_progress=on_progress)
        else:
            url, line, number = parts_of(reference)
            pull(url, folder, line=line, release=number, on_progress=on_progress)
        program = Manifest.from_bytes(read_manifest(folder), MANIFEST).program_digest
        share_derived(folder, program, (other for other in root.iterdir() if other.is_dir() and other != folder))
    return folder


def here(name: str | Path, *, on_progress: OnProgress = unwatched) -> tuple[str | None, Path]:
    """A package on this machine, fetched if need be: what `pinned` calls it (None: it was here), and its folder. Raises: as they do."""
    if not is_reference(name):
        return None, Path(name)
    source, digest = pinned(str(name))
    return source, fetched(source, default_cache_dir(), digest, on_progress=on_progress)


def _is_there(folder: Path, digest: str) -> bool:
    """Whether the cache has a package. What its files hold is compared with their digests when they are read."""
    if not (folder / MANIFEST).is_file():
        return False
    found = sha256_bytes(read_manifest(folder))
    if found != digest:
        raise IntegrityError(
            "a package in the cache has changed since it was fetched",
            where=str(folder),
            expected=digest,
            got=found,
            hint="Remove that folder; it is fetched again.",
        )
    return True


def parts_of(reference: str) -> tuple[str, str | None, str | None]:
    """Store, line and release of STORE, STORE#LINE or STORE#LINE/RELEASE; None: left out. Raises: StorageError where it is none."""
    url, _, rest = reference.partition("#")
    line, slash, number = rest.partition("/")
    if not url or (slash and not (line and number)):
        raise StorageError("this names no release", where=reference, expected="STORE#LINE/RELEASE, STORE#LINE or STORE")
    return url, line or None, number or None
