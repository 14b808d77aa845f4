"""Files of sources, at a path or URL."""

from __future__ import annotations

import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from trainload.core.errors import IntegrityError, WeightsError
from trainload.core.reading import reading
from trainload.core.storage.bounded_files import BoundedFiles
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.open_files import open_files
from trainload.packaging.weight_sources.weight_source import SourceFile

_SAMPLES = 16
_SAMPLE = 2**14
"""Bytes of each of the parts of a local file that its digest covers."""


class Files(Protocol):
    """Files that are only read; see `StoreFiles`."""

    def read(self, path: str, limit: int) -> bytes | None:
        """Return a file's bytes; None if it does not exist."""

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes; None if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""

    def part(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file. Raises IntegrityError if it does not exist."""

    def version(self, path: str) -> str | None:
        """Return what changes with a file's content, if the storage says it."""


class _LocalFiles:
    """`Files` of a folder of this machine.

    Links are followed, unlike in stores: a cache of Hugging Face consists of them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str, limit: int) -> bytes | None:
        size = self.size(path)
        return None if size is None else self.part(path, 0, min(size, limit))

    def size(self, path: str) -> int | None:
        with reading("it", self._root / path):
            try:
                found = (self._root / path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names(self, folder: str) -> list[str]:
        with reading("it", self._root / folder):
            try:
                return sorted(os.listdir(self._root / folder))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def part(self, path: str, start: int, stop: int) -> bytes:
        if self.size(path) is None:
            raise IntegrityError("there is no such file", where=str(self._root / path))
        with reading("it", self._root / path), (self._root / path).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def version(self, path: str) -> None:
        """Return None: copies of a file on other machines have other times."""


def files_at(folder: str) -> Files:
    """Return the files of a folder; calls to a URL have a time limit.

    Raises:
        StorageError: as `open_files`.
    """
    files = open_files(folder)
    return _LocalFiles(files.root) if isinstance(files, FolderFiles) else BoundedFiles(files)


def described(files: Files, name: str, where: str) -> SourceFile:
    """Return the record of a file.

    Its state is the version that its storage states, or a digest of parts of the file: the first
    one, the last one, and others at equal distances.

    Raises:
        WeightsError: there is no such file.
        StorageError: the storage cannot be reached.
    """
    size = files.size(name)
    if size is None:
        raise WeightsError("a file of weights is missing", where=f"{where}, {name}")
    state = files.version(name)
    if state is None:
        digest = hashlib.sha256()
        last = max(0, size - _SAMPLE)
        for number in range(_SAMPLES):
            start = last * number // (_SAMPLES - 1)
            digest.update(files.part(name, start, min(start + _SAMPLE, size)))
        state = f"sampled:{digest.hexdigest()}"
    return SourceFile(name=name, size=size, state=state)


class Unchanged:
    """Compares files with their records, each before it is read first.

    Args:
        files: the files.
        where: path or URL of the source, for messages.
        known: the records; () if there are none yet, and nothing is compared.
    """

    def __init__(self, files: Files, where: str, known: tuple[SourceFile, ...]) -> None:
        self._files, self._where = files, where
        self._known = {file.name: file for file in known}
        self._checked: set[str] = set()

    def check(self, name: str) -> None:
        """Compare a file with its record.

        Raises:
            WeightsError: it has changed, or there was no such file when the records were made.
            StorageError: the storage cannot be reached.
        """
        if not self._known or name in self._checked:
            return
        known, found = self._known.get(name), described(self._files, name, self._where)
        if found != known:
            raise WeightsError(
                "a file of weights has changed since the run was launched",
                where=f"{self._where}, {name}",
                expected="none" if known is None else f"{known.size:,} bytes, {known.state}",
                got=f"{found.size:,} bytes, {found.state}",
                hint="Restore the file, or launch a new run.",
            )
        self._checked.add(name)


class FileSource(ABC):
    """Part of a `WeightSource` that all sources of files have in common.

    Args:
        where: path or URL of the source.
        folder: folder of its files.
        known: the files as they were checked; () if they have not been.
    """

    def __init__(self, where: str, folder: str, known: Sequence[SourceFile]) -> None:
        self._where = where
        self._files = files_at(folder)
        self._unchanged = Unchanged(self._files, where, tuple(known))

    @property
    def where(self) -> str:
        """Path or URL of the source."""
        return self._where

    def _part(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file."""
        try:
            found = self._files.part(name, start, stop)
        except IntegrityError as error:
            raise WeightsError("a file is missing", where=f"{self._where}, {name}") from error
        if len(found) != stop - start:
            raise self._malformed(name, f"an end within bytes {start:,} to {stop:,}")
        return found

    @abstractmethod
    def _malformed(self, name: str, got: str | Exception) -> WeightsError:
        """Return the error for a file that is not in the source's format."""
