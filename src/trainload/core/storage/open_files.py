"""Opens the files that a path or URL names: a folder's, or those of a file system of fsspec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainload.core.credentials import check_no_credentials, resolve
from trainload.core.errors import StorageError
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import NO_OPTIONS, StoreFiles
from trainload.core.storage.remote_files import RemoteFiles


def open_files(url: str | Path, options: Mapping[str, Any] = NO_OPTIONS) -> StoreFiles:
    """The files that a path or fsspec URL names.

    Args:
        url: a folder, or s3://BUCKET/FOLDER, gs://..., memory://..., whatever fsspec and the libraries that are installed know.
        options: for fsspec's file system of that kind, such as `endpoint_url` for S3. There, and in the URL, ${env:NAME} and ${file:/PATH}
            stand for secrets.

    Raises:
        StorageError: no such kind is known, or the library for it is not installed; the URL holds credentials, or a reference to what is
            not here.
    """
    text = str(url)
    check_no_credentials(text)
    if text.startswith("oci://"):
        raise StorageError(
            "a registry holds packages under tags: it has no lines and releases",
            where=text,
            hint="Use push and pull; its own tools list tags.",
        )
    if "://" not in text or text.startswith(("file://", "local://")):
        path = text.partition("://")[2] if "://" in text else text
        return FolderFiles(Path(resolve(path)), shown=path if "${" in path else None)
    return RemoteFiles(text, options)
