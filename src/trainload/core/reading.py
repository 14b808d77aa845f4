"""Paths of this machine that are read: what is said where that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainload.core.errors import StorageError


@contextmanager
def reading(what: str, where: str | Path, instead: str = "") -> Iterator[None]:
    """Within it paths are looked at and read.

    Args:
        what: is read, as the beginning of a sentence.
        where: the path.
        instead: what else there is to do about it than to have it read.

    Raises:
        StorageError: storage fails.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what} cannot be read: {error.strerror}",
            where=str(where),
            hint=f"See that you may read it, and that its storage answers{instead}.",
        ) from error
