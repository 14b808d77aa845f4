"""The node's cache: what all of its processes share, and run; and what is removed of it when it grows too large.

packages/NAME, data/NAME     entries: a fetched or derived package, a converted data set,
compiled/NAME, kernels/NAME  the compiled graphs of a package under a plan, and all kernels of a release of torch and a version of builds
.../NAME.lock                locked by who makes or removes the entry
.../NAME.used                locked, with others, by each process that uses it; its time is that of the last use
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from trainload.core.errors import RequestError, StorageError

LOCK_SECONDS = 3600.0
"""How long a process waits for another one of the node that makes what both need."""
SIZE_VARIABLE = "TRAINLOAD_CACHE_GIB"
"""The variable that says how large all entries may grow together, in GiB; without it a tenth of the disk is left free."""
_FREE = 0.1
_KINDS = ("packages", "data", "compiled", "kernels")
_AWAY = "removed"
_used: dict[Path, int] = {}
"""What this process uses: entry -> the open file that says so."""


def default_cache_dir() -> Path:
    """Return the folder of a node's cache: $TRAINLOAD_CACHE_DIR, or trainload/ in the user's cache folder."""
    named = os.environ.get("TRAINLOAD_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainload"


def private_folder(path: Path) -> Path:
    """A folder that only this user can write: what is in it is loaded as native code.

    Raises:
        StorageError: somebody else owns it or may write to it.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            "the cache could be written by others, and what is in it is run",
            where=str(path),
            expected="a folder of your own, mode 0700",
            got=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
            hint="Set TRAINLOAD_CACHE_DIR to a folder of your own.",
        )
    return path


def use(entry: Path) -> None:
    """Says that this process uses an entry, which is not removed until the process ends or has left it. The entry need not be there yet.

    In a folder that this process may not write, as one that came with an image, nothing is said: whoever can write it looks after it.

    Raises:
        OSError: the disk is full.
    """
    if entry in _used:
        os.utime(_used[entry])
        return
    path = _beside(entry, "used")
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return
            raise
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            same = os.fstat(descriptor).st_ino == path.stat().st_ino
        except FileNotFoundError:
            same = False
        if same:
            break
        os.close(descriptor)  # the entry was removed, and this file with it, before we had the lock
    os.utime(descriptor)
    _used[entry] = descriptor


def in_use() -> frozenset[Path]:
    """The entries that this process uses."""
    return frozenset(_used)


def leave(but: Collection[Path] = ()) -> None:
    """Says that this process uses none of its entries any more, `but` those. Who reads one later has to say so again."""
    for entry in set(_used) - set(but):
        os.close(_used.pop(entry))


def make_room(cache: Path) -> None:
    """Removes entries from a node's cache that nobody uses, the longest unused first, until there is room.

    Called before an entry is made, which is not known to be small: it may take the cache past its size, until the next one is made.

    Args:
        cache: the node's.

    Raises:
        RequestError: $TRAINLOAD_CACHE_GIB is no number.
    """
    for kind in _KINDS:
        for left in (cache / kind).glob(f"*.{_AWAY}"):  # by a process that was killed while it removed it
            shutil.rmtree(left, ignore_errors=True)
    if _has_room(cache):
        return
    for _, entry in sorted((_last_use(entry), entry) for entry in _entries(cache)):
        if _removed(entry) and _has_room(cache):
            return


def _has_room(cache: Path) -> bool:
    limit = os.environ.get(SIZE_VARIABLE)
    if not limit:
        disk = os.statvfs(cache)
        return disk.f_bavail >= _FREE * disk.f_blocks
    try:
        most = float(limit) * 2**30
    except ValueError as error:
        raise RequestError("this is no size", where=f"${SIZE_VARIABLE}", expected="a number of GiB", got=limit) from error
    return _bytes(cache) <= most


def _bytes(cache: Path) -> int:
    """Of all entries. Packages share files: each counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for entry in _entries(cache):
        for path in entry.rglob("*"):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # it is being removed
            if stat.S_ISREG(status.st_mode):
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _entries(cache: Path) -> Iterator[Path]:
    for kind in _KINDS:
        if (cache / kind).is_dir():
            yield from (path for path in (cache / kind).iterdir() if path.is_dir() and _beside(path, "used").exists())


def _last_use(entry: Path) -> float:
    try:
        return _beside(entry, "used").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _removed(entry: Path) -> bool:
    """Removes an entry that nobody uses. Returns: whether it did."""
    try:
        with FileLock(_beside(entry, "lock"), timeout=0):
            descriptor = os.open(_beside(entry, "used"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                away = _beside(entry, _AWAY)
                entry.rename(away)
                _beside(entry, "used").unlink()
                shutil.rmtree(away)
            finally:
                os.close(descriptor)
    except (Timeout, BlockingIOError, FileNotFoundError):  # it is used, or gone
        return False
    return True


def _beside(entry: Path, what: str) -> Path:
    return entry.with_name(f"{entry.name}.{what}")
