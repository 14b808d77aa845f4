"""Error messages for local paths that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainload.core.errors import StorageError


@contextmanager
def reading(what: str, where: str | Path, instead: str = "") -> Iterator[None]:
    """Convert OSError within the block, which reads local paths, to StorageError.

    Args:
        what: name of the thing that is read, as the subject of a sentence.
        where: the path.
        instead: an alternative, appended to the hint.

    Raises:
        StorageError: the block raised OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what} cannot be read: {error.strerror}",
            where=str(where),
            hint=f"Check its permissions, and that its storage responds{instead}.",
        ) from error
