"""Replaces a small file as a whole. Imports nothing that takes time: the actor that holds what workers say needs it as it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes a file beside `path` and renames it: readers see the old content or the new. `durable`: also after a loss of power."""
    with draft_beside(path, data, durable=durable) as draft:
        draft.replace(path)


@contextmanager
def draft_beside(path: Path, data: bytes, *, durable: bool = True) -> Iterator[Path]:
    """A file beside `path` with this content. It is removed unless it was renamed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
