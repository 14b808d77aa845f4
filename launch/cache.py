"""The node's cache: what all of its processes share, and run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainload.capture.errors import StorageError

LOCK_SECONDS = 3600.0
"""How long a process waits for another one of the node that makes what both need."""


def private_folder(path: Path) -> Path:
    """A folder that only this user can write: what is in it is loaded as native code.

    Raises:
        StorageError: somebody else owns it or may write to it.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            "the cache could be written by others, and what is in it is run",
            where=str(path),
            expected="a folder of your own, mode 0700",
            got=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
            cure="Set TRAINLOAD_CACHE_DIR to a folder of your own.",
        )
    return path
