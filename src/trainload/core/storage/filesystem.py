"""fsspec's file systems: opened with secrets resolved, and what the libraries behind them raise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import fsspec

from trainload.core.credentials import resolve, resolve_options, without_secrets
from trainload.core.errors import StorageError

_EXTRAS = {"s3": "s3", "s3a": "s3"}


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, which keeps no listings: another process may have written since.

    Args:
        url: as fsspec knows them, with references for secrets.
        options: for the file system.

    Returns:
        It, and the path that the URL names in it.

    Raises:
        StorageError: no such kind is known, or the library for it is not installed.
    """
    protocol = url.partition("://")[0]
    try:
        fs, path = fsspec.core.url_to_fs(resolve(url), **{"use_listings_cache": False, **resolve_options(options)})
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        hint = f'Install it: pip install "trainload[{extra}]".' if extra else "Install the library that fsspec names."
        raise StorageError(f"what reaches {protocol}:// is not installed: {error}", where=url, hint=hint) from without_secrets(error)
    except ValueError as error:
        raise StorageError(f"this is no URL that fsspec knows: {error}", where=url) from without_secrets(error)
    return fs, path


def failures() -> tuple[type[BaseException], ...]:
    """What the libraries behind fsspec raise where a place cannot be reached; of those alone that are loaded."""
    named = (
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
        ("aiohttp", "ClientError"),
        ("azure.core.exceptions", "AzureError"),
        ("gcsfs.retry", "HttpError"),
        ("google.auth.exceptions", "GoogleAuthError"),
    )
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in named)
    return (OSError, TimeoutError, *(kind for kind in loaded if isinstance(kind, type)))


def unreachable(where: str, error: BaseException) -> StorageError:
    """What is raised for one of `failures`."""
    if isinstance(error, PermissionError):
        return StorageError(f"the store refuses: {error}", where=where, hint="Check the credentials and their rights.")
    return StorageError(f"the store cannot be reached: {str(error) or type(error).__name__}", where=where)
