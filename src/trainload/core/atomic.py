"""Atomic writes: a file, a link or a folder appears at its path complete, or not at all.

    replace_file(path, data)                    # a reader sees the old content or the new
    with replacing(path) as temporary: ...      # the same, for code that writes to a path
    if not create_file(path, data): ...         # of concurrent calls exactly one succeeds
    with new_folder(path) as temporary: ...

Temporary files and folders are hidden siblings of their path with random names: process ids repeat
between containers that share a file system.

This module imports only the standard library, since the actor that keeps a run's messages imports
it at its start.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Error numbers of file systems without hard links."""


def temporary_beside(path: Path) -> Path:
    """Return a unique path for a temporary file or folder next to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")


def remove_temporaries(path: Path) -> None:
    """Remove the temporary folders of `path` that killed processes left.

    Hold the lock of all writers of `path` when calling it.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def temporary_file(
    path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666
) -> Iterator[Path]:
    """Yield a temporary file next to `path`.

    It is removed when the block ends, unless the block renames it.

    Args:
        path: path at which the file is to appear.
        data: content of the file.
        durable: if True, the content is synced to disk, so that it survives a power failure.
        mode: permissions of the file, before the umask.

    Raises:
        OSError: it cannot be written.
    """
    temporary = temporary_beside(path)
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb"
        ) as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file, replacing the one at `path`, if any.

    Arguments and errors are those of `temporary_file`.
    """
    with temporary_file(path, data, durable=durable) as temporary:
        temporary.replace(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the block to write; it replaces `path` unless the block raises.

    Raises:
        OSError: the file cannot be synced to disk or renamed.
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Sync a temporary file to disk and rename it to `path`. Raises OSError."""
    sync_file(temporary)
    temporary.replace(path)


def create_file(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Write a new file. If several processes do so concurrently, exactly one succeeds.

    On a file system without hard links several processes may succeed concurrently; the file is
    still complete.

    Args:
        path: path at which the file is to appear.
        data: content of the file.
        mode: permissions of the file, before the umask.

    Returns:
        True if the file at `path` is now this one. A network file system repeats a link request
        whose reply was lost, and then finds its own link: so a file with the same content counts as
        this one.

    Raises:
        OSError: it cannot be written.
    """
    with temporary_file(path, data, mode=mode) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return _has_content(path, data)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if path.exists():
                return _has_content(path, data)
            temporary.replace(path)
    return True


def _has_content(path: Path, data: bytes) -> bool:
    """Return True if the file at `path` has this content.

    Links are not followed, since others may be able to write to the folder.
    """
    with os.fdopen(
        os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
    ) as file:
        return file.read(len(data) + 1) == data


def replace_link(path: Path, target: str) -> None:
    """Replace the symbolic link at `path` by one to `target`. Raises OSError."""
    temporary = temporary_beside(path)
    temporary.symlink_to(target)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder next to `path`.

    It is removed when the block ends, unless the block renames it. Raises OSError.
    """
    temporary = temporary_beside(path)
    temporary.mkdir(0o700)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` unless the block raises.

    Its content is not synced to disk; use it for caches.

    Raises:
        OSError: the folder cannot be created or renamed, or `path` is a folder that is not empty.
    """
    with temporary_folder(path) as temporary:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(path)


def sync_file(path: Path) -> None:
    """Sync a file's content to disk. Raises OSError."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk. Raises OSError."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
