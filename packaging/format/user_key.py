"""The user's secret key, which authenticates graphs that this user derived."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from trainload.core.atomic import create_file
from trainload.core.errors import StorageError

STATE_DIR = "TRAINLOAD_STATE_DIR"
"""Environment variable: the folder of the user's key. By default ~/.local/state/trainload."""
_KEY_BYTES = 32


def user_key(*, create: bool) -> bytes:
    """Return the user's secret key, or b"" if there is none and `create` is false."""
    folder = Path(os.environ.get(STATE_DIR) or Path.home() / ".local" / "state" / "trainload")
    path = folder / "derived.key"
    if create and not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # if another process was first, its key is used
            create_file(path, secrets.token_bytes(_KEY_BYTES), mode=0o600)
        except OSError as error:
            raise StorageError(
                f"the key cannot be created: {error.strerror}",
                where=str(folder),
                hint=f"Set {STATE_DIR} to a folder that you can write.",
            ) from error
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise StorageError(
                "the key is readable by other users",
                where=str(path),
                expected="mode 0600",
                hint="Remove it; a new one is created.",
            )
        secret = path.read_bytes()
    except FileNotFoundError:
        return b""
    if len(secret) != _KEY_BYTES:
        raise StorageError(
            "the key is damaged", where=str(path), hint="Remove it; a new one is created."
        )
    return secret
