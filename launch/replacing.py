"""Write a small file atomically. Imports nothing that is slow to import, because the mailbox actor imports this module at start-up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a temporary file beside `path` and rename it: readers see the old content or the new. `durable`: also after a power failure."""
    with draft_beside(path, data, durable=durable) as draft:
        draft.replace(path)


@contextmanager
def draft_beside(path: Path, data: bytes, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary file beside `path` with this content. It is removed unless the caller renames it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
