"""Access to the files at a path or URL: of a folder, or of an fsspec file system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainload.core.credentials import check_no_credentials, resolve
from trainload.core.errors import StorageError
from trainload.core.storage.bounded_files import BoundedFiles
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import NO_OPTIONS, StoreFiles
from trainload.core.storage.remote_files import RemoteFiles


def open_bounded(url: str, seconds: float | None = None) -> StoreFiles:
    """Return the files at a URL, with a time limit for every call; see `BoundedFiles`. The errors
    are those of `open_files`.
    """
    return BoundedFiles(open_files(url), seconds)


def open_files(url: str | Path, options: Mapping[str, Any] = NO_OPTIONS) -> StoreFiles:
    """Return the files at a path or fsspec URL.

    Args:
        url: a folder, or a URL that fsspec and the installed libraries support: s3://BUCKET/FOLDER,
            gs://..., memory://...
        options: options for the fsspec file system, such as `endpoint_url` for S3. Here and in the
            URL, ${env:NAME} and ${file:/PATH} are references to secrets.

    Raises:
        StorageError: the protocol is unknown, or the library for it is not installed; the URL
            contains credentials, or a reference that cannot be resolved.
    """
    text = str(url)
    check_no_credentials(text)
    if text.startswith("oci://"):
        raise StorageError(
            "an OCI registry has tags, but no lines or releases",
            where=text,
            hint="Use push and pull; list tags with the registry's own tools.",
        )
    if "://" not in text or text.startswith(("file://", "local://")):
        path = text.partition("://")[2] if "://" in text else text
        return FolderFiles(Path(resolve(path)), shown=path if "${" in path else None)
    return RemoteFiles(text, options)
