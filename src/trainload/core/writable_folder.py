"""Whether a folder can be written: tried, and not believed from its permissions, which a mount, a quota or an attribute may overrule."""

from __future__ import annotations

import tempfile
from pathlib import Path

from trainload.core.errors import StorageError


def existing_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def check_writable_folder(folder: Path, problem: str, hint: str) -> None:
    """Check that a folder, which need not exist yet, can be made and written: makes a file where it is or would be, and removes it.

    Args:
        folder: that folder.
        problem: what is said of it where it cannot.
        hint: what to do about it.

    Raises:
        StorageError: it cannot; what was tried, and why it failed.
    """
    existing = folder
    try:
        existing = existing_folder(folder)
        if not existing.is_dir():
            raise StorageError(problem, where=str(folder), expected=f"{existing} to be a folder", got="a file", hint=hint)
        with tempfile.NamedTemporaryFile(prefix=".trainload-probe-", dir=existing) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise StorageError(
            problem,
            where=str(folder),
            expected=f"to make a file in {existing}, and to remove it again",
            got=error.strerror or str(error),
            hint=hint,
        ) from error
