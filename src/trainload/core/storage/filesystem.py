"""fsspec's file systems, opened with resolved secrets, and their libraries' exceptions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import fsspec

from trainload.core.credentials import resolve, resolve_options, without_secrets
from trainload.core.errors import StorageError

_EXTRAS = {"s3": "s3", "s3a": "s3", "hf": "hub"}

VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "blob_id",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""Names that file systems use for a property that changes with a file's content."""


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL.

    It does not cache listings, since other processes may write to it.

    Args:
        url: an fsspec URL, with references for secrets.
        options: options of the file system.

    Returns:
        The file system, and the URL's path in it.

    Raises:
        StorageError: the protocol is unknown, or the library for it is not installed.
    """
    protocol = url.partition("://")[0]
    try:
        fs, path = fsspec.core.url_to_fs(
            resolve(url), **{"use_listings_cache": False, **resolve_options(options)}
        )
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = (
            f'Install it: pip install "trainload[{extra}]".'
            if extra
            else "Install the library that fsspec names."
        )
        raise StorageError(
            f"the library for {protocol}:// is not installed: {error}", where=url, hint=hint
        ) from without_secrets(error)
    except ValueError as error:
        raise StorageError(
            f"fsspec does not support this URL: {error}", where=url
        ) from without_secrets(error)
    return fs, path


def failures() -> tuple[type[BaseException], ...]:
    """Return the exception types of fsspec's libraries for an unreachable storage, of the libraries
    that are imported.
    """
    qualified_names = (
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
        ("aiohttp", "ClientError"),
        ("azure.core.exceptions", "AzureError"),
        ("gcsfs.retry", "HttpError"),
        ("google.auth.exceptions", "GoogleAuthError"),
        # huggingface_hub's client of HTTP, in its present and its earlier versions
        ("httpx2", "HTTPError"),
        ("httpx", "HTTPError"),
    )
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in qualified_names)
    return (OSError, TimeoutError, *(kind for kind in loaded if isinstance(kind, type)))


def unreachable(where: str, error: BaseException) -> StorageError:
    """Return the StorageError for one of `failures`."""
    if isinstance(error, PermissionError):
        return StorageError(
            f"the store denied access: {error}",
            where=where,
            hint="Check the credentials and their permissions.",
        )
    return StorageError(
        f"the store cannot be reached: {str(error) or type(error).__name__}", where=where
    )
