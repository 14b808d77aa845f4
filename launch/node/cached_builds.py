"""Builds in a node's cache: complete folders, each added by one process of the node."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from trainload.core.atomic import new_folder, remove_temporaries
from trainload.core.canonical_json import sha256_file
from trainload.core.errors import StorageError
from trainload.launching.node.cache import LOCK_SECONDS, make_room, use
from trainload.packaging.builds.build_record import INDEX_FILE

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})


class _NothingAdded(Exception):
    """Raised within `new_folder` so that the folder does not appear."""


def add_build(final: Path, cache_dir: Path, fill: Callable[[Path], bool]) -> bool:
    """Add a folder to the node's cache, unless another process has added it meanwhile.

    Args:
        final: the folder.
        cache_dir: the node's cache.
        fill: function that fills a draft of the folder; it returns False if it cannot.

    Returns:
        True if the cache has the folder now.
    """
    use(final)
    with filelock.FileLock(f"{final}.lock", timeout=LOCK_SECONDS):
        if is_whole(final):
            return True
        shutil.rmtree(final, ignore_errors=True)
        remove_temporaries(final)
        make_room(cache_dir)
        with suppress(_NothingAdded), new_folder(final) as draft:
            if not fill(draft) or not is_whole(draft):
                raise _NothingAdded
            return True
    return False


def fetched_of(root: Path, name: str) -> list[Path]:
    """Return the builds of a name that were fetched into the cache from a store, newest first."""
    folders = [path for path in root.glob(f"{name}-*") if path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


@contextmanager
def no_room_told(cache_dir: Path) -> Iterator[None]:
    """Convert an OSError within the context into a StorageError if the node's cache is full or not
    writable.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise StorageError(
            "the compiled graphs cannot be written",
            where=str(cache_dir),
            expected="free disk space and write permission",
            got=error.strerror or str(error),
            hint="Free some disk space, or set TRAINLOAD_CACHE_DIR to another folder.",
        ) from error


def is_kept(folder: Path) -> bool:
    """Return True if the cache holds a complete build; it is then marked as used by this process,
    so that it is not evicted.
    """
    if not folder.is_dir():
        return False
    use(folder)
    return is_whole(folder)


def is_whole(folder: Path) -> bool:
    """Return True if a build is complete, and unchanged since it was written."""
    if not (folder / INDEX_FILE).is_file():
        return False
    digests = json.loads((folder / INDEX_FILE).read_bytes())["digests"]
    return all(
        (folder / name).is_file() and sha256_file(folder / name) == digest
        for name, digest in digests.items()
    )
