"""The node's cache, which all of its processes share, and its eviction.

packages/NAME, data/NAME     entries: a fetched or derived package, a converted dataset,
compiled/NAME                the compiled graphs of a package under a plan,
kernels/NAME                 all kernels of a torch release and BUILD_VERSION
.../NAME.lock                lock of the process that creates or removes the entry
.../NAME.used                shared lock of the processes that use the entry; its mtime is the time
                             of the last use
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
from trainload.core.formatting import size

LOCK_SECONDS = 3600.0
"""Time that a process waits for another process of the node that creates an entry."""
SIZE_VARIABLE = "TRAINLOAD_CACHE_GIB"
"""Environment variable with the maximum total size of all entries in GiB.

By default, a tenth of the disk is left free.
"""
_FREE_SHARE = 0.1
_KINDS = ("packages", "data", "compiled", "kernels")
_REMOVED_SUFFIX = "removed"
_used: dict[Path, int] = {}
"""Entries that this process uses -> the file descriptor that holds the shared lock."""


def default_cache_dir() -> Path:
    """Return the folder of a node's cache: $TRAINLOAD_CACHE_DIR, or trainload/ in the user's cache
    folder.
    """
    configured = os.environ.get("TRAINLOAD_CACHE_DIR")
    return (
        Path(configured)
        if configured
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainload"
    )


def private_folder(path: Path) -> Path:
    """Create a folder if necessary, and check that only this user can write to it, since native
    code is loaded from it.

    Raises:
        StorageError: another user owns it, or may write to it.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            "other users can write to the cache, whose files are executed",
            where=str(path),
            expected="a folder that you own, mode 0700",
            got=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
            hint="Set TRAINLOAD_CACHE_DIR to a folder that you own and only you can write to.",
        )
    return path


def use(entry: Path) -> None:
    """Mark an entry as used by this process, so that it is not evicted until the process ends or
    calls `leave`.

    The entry need not exist yet. In a read-only cache, such as one in a container image, nothing is
    marked.

    Raises:
        OSError: the disk is full.
    """
    if entry in _used:
        os.utime(_used[entry])
        return
    path = _sibling_path(entry, "used")
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
        os.close(descriptor)  # the entry was evicted, and this file with it, before we got the lock
    os.utime(descriptor)
    _used[entry] = descriptor


def in_use() -> frozenset[Path]:
    """Return the entries that this process uses."""
    return frozenset(_used)


def leave(but: Collection[Path] = ()) -> None:
    """Release all entries that this process uses, except those in `but`.

    Call `use` before reading one again.
    """
    for entry in set(_used) - set(but):
        os.close(_used.pop(entry))


def make_room(cache: Path, needed: int = 0, what: str = "a new entry") -> None:
    """Evict unused entries from a node's cache, least recently used first, until there is room.

    It is called before an entry is created. The new entry may exceed the limit, together with
    others, until the next one is created.

    Args:
        cache: the node's cache.
        needed: bytes of the new entry; 0 if they are unknown.
        what: what it is, for the error.

    Raises:
        RequestError: $TRAINLOAD_CACHE_GIB is not a number.
        StorageError: the new entry is larger than $TRAINLOAD_CACHE_GIB (unless that is 0: nothing
            stays that is not in use), or than what the disk has beside the entries in use.
    """
    for kind in _KINDS:
        # left by a process that was killed while it removed an entry
        for leftover in (cache / kind).glob(f"*.{_REMOVED_SUFFIX}"):
            shutil.rmtree(leftover, ignore_errors=True)
    limit = _limit()
    if limit and needed > limit:
        raise _room_error(cache, f"at most {size(int(limit))}, ${SIZE_VARIABLE}", needed, what)
    if _has_room(cache, limit, needed):
        return
    for _, entry in sorted((_last_use(entry), entry) for entry in _entries(cache)):
        if _remove_unused(entry) and _has_room(cache, limit, needed):
            return
    if needed > (free := _free_bytes(cache)):
        raise _room_error(cache, f"at most {size(free)}, which are free", needed, what)


def _room_error(cache: Path, expected: str, needed: int, what: str) -> StorageError:
    return StorageError(
        f"{what} does not fit this node's cache",
        where=str(cache),
        expected=expected,
        got=size(needed),
        hint=(
            f"Free some disk space, raise ${SIZE_VARIABLE}, or choose another cache with"
            " $TRAINLOAD_CACHE_DIR."
        ),
    )


def _limit() -> float | None:
    """Return the maximum bytes of all entries; None if a part of the disk is left free instead."""
    limit = os.environ.get(SIZE_VARIABLE)
    try:
        return float(limit) * 2**30 if limit else None
    except ValueError as error:
        raise RequestError(
            "this is not a size",
            where=f"${SIZE_VARIABLE}",
            expected="a number of GiB",
            got=str(limit),
        ) from error


def _has_room(cache: Path, limit: float | None, needed: int) -> bool:
    if needed and needed > _free_bytes(cache):
        return False
    if limit is not None:
        return _total_bytes(cache) <= limit
    disk = os.statvfs(cache)
    return disk.f_bavail >= _FREE_SHARE * disk.f_blocks


def _free_bytes(cache: Path) -> int:
    disk = os.statvfs(cache)
    return disk.f_bavail * disk.f_frsize


def _total_bytes(cache: Path) -> int:
    """Return the total size of all entries. Files that packages share (hard links) count once."""
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
            yield from (
                path
                for path in (cache / kind).iterdir()
                if path.is_dir() and _sibling_path(path, "used").exists()
            )


def _last_use(entry: Path) -> float:
    try:
        return _sibling_path(entry, "used").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_unused(entry: Path) -> bool:
    """Remove an entry unless a process uses it; return True if it was removed."""
    try:
        with FileLock(_sibling_path(entry, "lock"), timeout=0):
            descriptor = os.open(_sibling_path(entry, "used"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                away = _sibling_path(entry, _REMOVED_SUFFIX)
                entry.rename(away)
                _sibling_path(entry, "used").unlink()
                shutil.rmtree(away)
            finally:
                os.close(descriptor)
    except (Timeout, BlockingIOError, FileNotFoundError):  # in use, or removed already
        return False
    return True


def _sibling_path(entry: Path, what: str) -> Path:
    return entry.with_name(f"{entry.name}.{what}")
