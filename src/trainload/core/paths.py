"""Paths and files: valid names, reading without following links, and durable writing."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from trainload.core.arguments import shown
from trainload.core.errors import IntegrityError, StorageError, UnsafePackageError

LONGEST_NAME = 235
"""Maximum bytes of a file name.

Most file systems allow 255, and the name of the temporary file is longer.
"""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def open_inside(root: Path, path: str) -> BinaryIO:
    """Open a package's file for reading.

    Links are not followed, neither at the file nor at a folder between `root` and it, even if they
    were created after the package was opened.

    Raises:
        UnsafePackageError: there is a link, or the file is not a plain file.
        IntegrityError: the file is missing.
    """
    *folders, name = path.split("/")
    with ExitStack() as stack:
        try:
            inner = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, inner)
            for folder in folders:
                inner = os.open(
                    folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inner
                )
                stack.callback(os.close, inner)
            descriptor = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=inner
            )
        except FileNotFoundError as error:
            raise IntegrityError(
                "a file of the package is missing", where=path, hint="Fetch the package again."
            ) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # ENXIO: a socket
                raise UnsafePackageError(
                    "the path contains a link or something that is not a regular file", where=path
                ) from error
            raise StorageError(
                f"a file of the package cannot be read: {error.strerror}", where=path
            ) from error
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UnsafePackageError("a file of the package is not a regular file", where=path)
    return file


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and sync it to disk.

    Raises:
        FileExistsError: the file exists already.
        OSError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source` if the file system can, otherwise a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        write_copy(source, target)


def empty_folder(folder: Path) -> None:
    """Remove everything in a folder. Raises OSError."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_copy(source: Path, target: Path) -> None:
    """Copy a file's bytes and sync them to disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("xb") as write:
        shutil.copyfileobj(read, write, 2**20)
        write.flush()
        os.fsync(write.fileno())


def check_name(path: Path) -> None:
    """Check that the last part of a path is a valid file name, even with a temporary file's suffix.

    Raises:
        StorageError: it is too long or contains NUL.
    """
    if "\0" in str(path) or len(os.fsencode(path.name)) > LONGEST_NAME:
        raise StorageError(
            "the file name is too long or contains NUL",
            where=shown(str(path)),
            expected=f"at most {LONGEST_NAME} bytes, without NUL",
            hint="Choose another name.",
        )


def is_full(error: OSError) -> bool:
    """Return True if the error means that the disk, a quota or a limit of file sizes is
    exhausted.
    """
    return error.errno in _FULL
