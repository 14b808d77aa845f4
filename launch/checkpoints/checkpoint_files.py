"""The files of a published checkpoint, in a folder or at a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from trainload.core.canonical_json import MAX_BYTES
from trainload.core.errors import IntegrityError
from trainload.core.storage.bounded_files import BoundedFiles
from trainload.core.storage.interface import NO_OPTIONS
from trainload.core.storage.places import Where, is_url
from trainload.core.storage.remote_files import RemoteFiles
from trainload.packaging.tensors.chunks import Ranges, ranges_of


class CheckpointFiles(Protocol):
    """The files of a published checkpoint.

    All methods raise OSError or StorageError if the storage fails, and FileNotFoundError if the
    file does not exist.
    """

    @property
    def where(self) -> Where:
        """The checkpoint."""

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def opened(self, name: str) -> AbstractContextManager[Ranges]:
        """Open a file for reading parts of it."""


def files_at(where: Where) -> CheckpointFiles:
    """Return the files of a checkpoint.

    Raises: StorageError: no such kind of URL is known, or the library for it is not installed.
    """
    return _UrlFiles(str(where)) if is_url(where) else _FolderFiles(Path(where))


class _FolderFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> Path:
        return self._folder

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def opened(self, name: str) -> AbstractContextManager[Ranges]:
        return ranges_of((self._folder / name).open("rb", buffering=0))


class _UrlFiles:
    def __init__(self, url: str) -> None:
        self._files = BoundedFiles(RemoteFiles(url, NO_OPTIONS))

    @property
    def where(self) -> str:
        return self._files.url

    def read(self, name: str) -> bytes:
        data = self._files.read(name, MAX_BYTES)
        if data is None:
            raise FileNotFoundError(f"there is no {self._files.url}/{name}")
        return data

    def size(self, name: str) -> int:
        size = self._files.size(name)
        if size is None:
            raise FileNotFoundError(f"there is no {self._files.url}/{name}")
        return size

    @contextmanager
    def opened(self, name: str) -> Iterator[Ranges]:
        yield _UrlRanges(self._files, name)


class _UrlRanges:
    """`Ranges` of a file at a URL. Each range is one request."""

    def __init__(self, files: BoundedFiles, path: str) -> None:
        self._files, self._path = files, path

    def announce(self, start: int, stop: int) -> None:
        """Do nothing: there is no prefetch."""

    def fill(self, start: int, into: memoryview) -> None:
        try:
            data = self._files.part(self._path, start, start + len(into))
        except IntegrityError as error:
            raise FileNotFoundError(f"there is no {self._files.url}/{self._path}") from error
        into[: len(data)] = data
