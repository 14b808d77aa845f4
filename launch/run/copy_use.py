"""Locks of working copies of runs, which end with their process: for use, and for driving.

COPY/.used     shared by the processes that read or write the copy
COPY/.driven   held by the one that drives the run in it
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainload.core.errors import StorageError

_USED, _DRIVEN = ".used", ".driven"
LOCKS = frozenset({_USED, _DRIVEN})
_TRIES, _PAUSE_SECONDS = 10, 0.1
_used_here: set[Path] = set()
_driven_here: set[Path] = set()


@contextmanager
def used(copy: Path) -> Iterator[None]:
    """Use a copy inside the block: nobody else removes it.

    Raises:
        OSError: its folder cannot be written.
    """
    descriptor = _open(copy / _USED)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    _used_here.add(copy)
    try:
        yield
    finally:
        _used_here.discard(copy)
        os.close(descriptor)


@contextmanager
def driven(copy: Path) -> Iterator[None]:
    """Drive in a copy inside the block, as the only process that does. Blocks may be nested.

    Raises:
        StorageError: another process drives in it.
        OSError: its folder cannot be written.
    """
    if copy in _driven_here:
        yield
        return
    descriptor = _open(copy / _DRIVEN)
    try:
        _lock_alone(descriptor, copy)
        _driven_here.add(copy)
        yield
    finally:
        _driven_here.discard(copy)
        os.close(descriptor)


def is_used(copy: Path) -> bool:
    """Return True if a process uses a copy. Nobody may begin to use it at the same time."""
    return not _can_lock(copy / _USED, fcntl.LOCK_EX)


def is_driven(copy: Path) -> bool:
    """Return True if a process drives in a copy."""
    return not _can_lock(copy / _DRIVEN, fcntl.LOCK_SH)


def is_used_here(copy: Path) -> bool:
    """Return True if this process uses a copy."""
    return copy in _used_here


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock_alone(descriptor: int, copy: Path) -> None:
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # or somebody looks whether it is driven
            time.sleep(_PAUSE_SECONDS)
    raise StorageError(
        "another process drives a run in this folder",
        where=str(copy),
        hint="Watch it with `trainload status`, or end it with `trainload stop`.",
    )


def _can_lock(path: Path, kind: int) -> bool:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
