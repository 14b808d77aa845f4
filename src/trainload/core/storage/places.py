"""Places that a user names: paths on this machine, and URLs."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from trainload.core.credentials import check_no_credentials
from trainload.core.errors import StorageError

Where: TypeAlias = Path | str
"""The path of a file or folder, or an fsspec URL."""


def is_url(where: Where) -> bool:
    """Return True for an fsspec URL; False for a path on this machine, also as file://PATH."""
    return (
        isinstance(where, str) and "://" in where and not where.startswith(("file://", "local://"))
    )


def split_url(url: str) -> tuple[str, str]:
    """Return the URL of a file's folder, and its name."""
    folder, _, name = url.rpartition("/")
    return folder, name


def local_path(where: Where) -> Path:
    """Return the path of a place on this machine, without its protocol."""
    return Path(where.partition("://")[2] if isinstance(where, str) and "://" in where else where)


def path_here(where: Where) -> Path:
    """Return the path of a place that must be on this machine.

    Raises:
        StorageError: it is a URL.
    """
    if is_url(where):
        raise StorageError(
            f"{where} is a URL, and this works with files of this machine",
            hint="Use a path. `trainload push` publishes a package at a URL, `pull` fetches it.",
        )
    return local_path(where)


def absolute_place(where: Where | None) -> str | None:
    """Return an absolute path, or a URL as it is; None for None.

    Raises:
        StorageError: it contains credentials.
    """
    if where is None:
        return None
    check_no_credentials(str(where))
    if str(where).startswith("${") or is_url(where):
        return str(where)
    return str(local_path(where).absolute())
