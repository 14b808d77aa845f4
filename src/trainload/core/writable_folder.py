"""Test of a folder by a write, since mounts, quotas and attributes may overrule its permissions."""

from __future__ import annotations

import tempfile
from pathlib import Path

from trainload.core.errors import StorageError


def existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def check_writable_folder(folder: Path, problem: str, hint: str) -> None:
    """Check that a folder, which need not exist yet, can be created and written.

    A file is created in it, or in the nearest existing folder above it, and removed again.

    Args:
        folder: the folder.
        problem: error message.
        hint: hint.

    Raises:
        StorageError: it cannot; the message says what was tried, and why it failed.
    """
    existing = folder
    try:
        existing = existing_folder(folder)
        if not existing.is_dir():
            raise StorageError(
                problem,
                where=str(folder),
                expected=f"{existing} to be a folder",
                got="a file",
                hint=hint,
            )
        with tempfile.NamedTemporaryFile(prefix=".trainload-probe-", dir=existing) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise StorageError(
            problem,
            where=str(folder),
            expected=f"to create a file in {existing} and remove it again",
            got=error.strerror or str(error),
            hint=hint,
        ) from error
