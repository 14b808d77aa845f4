"""The files of a dataset, on disk or at fsspec URLs: find them, identify their content, and open
them.
"""

from __future__ import annotations

import glob
import hashlib
import io
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from fsspec.core import has_magic

from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json, sha256_bytes, sha256_file
from trainload.core.credentials import without_secrets
from trainload.core.errors import DataError, MissingDataError
from trainload.core.reading import reading
from trainload.core.storage.filesystem import (
    VERSION_KEYS,
    failures,
    file_system,
    unreachable,
)
from trainload.core.storage.places import is_url, local_path
from trainload.launching.data.saved_datasets import (
    SPLITS,
    STATE,
    check_complete,
    check_split,
    data_files,
)

Source = str | Path | Sequence[str | Path]
"""One or several files, folders of files or glob patterns, each a path or an fsspec URL. The files
of a folder or pattern are sorted by name; several sources keep their order. A folder that has the
name of a data file, or that a pattern matches, stands for the data files in it.
"""

_BLOCK_BYTES = 8 << 20
"""Bytes of one request to a URL."""
_MOST_LISTED = 2**26
"""Largest size of a list of files."""
_SETTLED_NS = 2_000_000_000
"""A file that was modified less than this time before it was read may change again with the same
timestamp.
"""


class DataFile(Protocol):
    """A file of a dataset."""

    @property
    def name(self) -> str:
        """Name in messages: its path or URL."""

    @property
    def suffix(self) -> str:
        """Suffix of the name, with the dot."""

    def opened(self) -> Any:
        """Return a context manager that yields a seekable binary stream.

        Opening and reading raise OSError or, for a URL, StorageError.
        """

    def identity(self, cache_dir: Path) -> str:
        """Return a text that identifies the content; `cache_dir` caches digests.

        The errors are those of `opened`.
        """


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file in this machine's file system."""

    path: Path

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    @property
    def suffix(self) -> str:
        """Suffix of the name, with the dot."""
        return self.path.suffix

    def opened(self) -> Any:
        """Open the file (see `DataFile`)."""
        return self.path.open("rb")

    def identity(self, cache_dir: Path) -> str:
        """Return its SHA-256, which is cached as long as path, inode, size and modification times
        are the same.
        """
        status = self.path.stat()
        facts = [
            str(self.path.resolve()),
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        ]
        memory = cache_dir / "digests" / sha256_bytes(canonical_json(facts))
        if memory.is_file():
            return memory.read_text("ascii")
        began = time.time_ns()
        digest = sha256_file(self.path)
        if max(status.st_mtime_ns, status.st_ctime_ns) + _SETTLED_NS < began:
            memory.parent.mkdir(exist_ok=True)
            # several processes may write it concurrently
            replace_file(memory, digest.encode("ascii"), durable=False)
        return digest


@dataclass(frozen=True, slots=True)
class UrlFile:
    """A file in an fsspec file system, with its path there."""

    name: str
    fs: Any
    path: str

    @property
    def suffix(self) -> str:
        """Suffix of the name, with the dot."""
        return PurePosixPath(self.path.partition("?")[0]).suffix

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Open the file (see `DataFile`)."""
        with _converting_failures(self.name):
            file = self.fs.open(self.path, "rb", block_size=_BLOCK_BYTES)
        with io.BufferedReader(_UrlStream(file, self.name), 1 << 20) as stream:
            yield stream

    def identity(self, cache_dir: Path) -> str:
        """Return a hash of its version in the file system, or its SHA-256 if the file system
        reports no version.
        """
        with _converting_failures(self.name):
            facts = self.fs.info(self.path)
        version = {name: str(facts[name]) for name in VERSION_KEYS if facts.get(name)}
        if not version:
            with self.opened() as stream:
                digest = hashlib.sha256()
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
                return digest.hexdigest()
        return sha256_bytes(canonical_json([self.name, facts.get("size"), version]))


class _UrlStream(io.RawIOBase):
    """A stream over an fsspec file whose failures are raised as StorageError."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _converting_failures(self._name):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        with _converting_failures(self._name):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with suppress(*failures()):
                self._file.close()
        super().close()


def find_files(source: Source, endings: Collection[str]) -> tuple[DataFile, ...]:
    """Return the files that a source names, and check that they exist.

    Args:
        source: see `Source`.
        endings: suffixes of data files; other files in a folder are ignored.

    Raises:
        MissingDataError: there are no files, or one is a broken link.
        DataError: a file is named twice.
        StorageError: a path cannot be read, a URL cannot be reached, or the library for its
            protocol is not installed.
    """
    files = list_files(source, endings)
    for file in files:
        if isinstance(file, LocalFile):
            _check_exists(file.path)
    return files


def list_files(source: Source, endings: Collection[str]) -> tuple[DataFile, ...]:
    """Return the files that a source names, as `find_files` does, including broken links in folders
    and patterns.
    """
    parts = [source] if isinstance(source, (str, Path)) else list(source)
    files = [file for part in parts for file in _files_of(part, endings)]
    if not files:
        raise _no_files_error(spelled(source), endings)
    names = [file.name for file in files]
    twice = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if twice:
        raise DataError(
            "a file is named twice",
            where=spelled(source),
            got=", ".join(twice),
            hint="Name it once.",
        )
    return tuple(files)


def spelled(source: Source) -> str:
    """Return a source as text for messages."""
    return (
        str(source) if isinstance(source, (str, Path)) else ", ".join(str(part) for part in source)
    )


def _files_of(part: str | Path, endings: Collection[str]) -> Sequence[DataFile]:
    if is_url(part):
        return _files_at(str(part), endings)
    path = local_path(part)
    with reading("the data", part):
        if path.is_dir():
            return _files_in(path, endings)
        if path.is_file():
            return [LocalFile(path)]
        matched = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else []
        files = dict.fromkeys(
            file for name in matched for file in _file_or_files(Path(name), endings)
        )
    if not files:
        raise _no_files_error(str(part), endings)
    return list(files)


def _files_in(folder: Path, endings: Collection[str]) -> list[LocalFile]:
    if (folder / SPLITS).is_file():
        check_split((folder / SPLITS).read_bytes(), str(folder))
    if (folder / STATE).is_file():
        names = data_files((folder / STATE).read_bytes(), str(folder))
        if names is not None:
            check_complete([n for n in names if not (folder / n).is_file()], str(folder))
            return [LocalFile(folder / name) for name in names]
    return [
        file
        for path in sorted(folder.iterdir())
        if _is_data(path.name, endings)
        for file in _file_or_files(path, endings)
    ]


def _file_or_files(path: Path, endings: Collection[str]) -> list[LocalFile]:
    return _files_in(path, endings) if path.is_dir() else [LocalFile(path)]


def _check_exists(path: Path) -> None:
    with reading("the data", path):
        if path.exists():
            return
        link = f"a link to {path.readlink()}" if path.is_symlink() else "no file"
    raise MissingDataError(
        "a file of the data does not exist",
        where=str(path),
        got=link,
        hint="Restore it, or remove the link.",
    )


def _files_at(url: str, endings: Collection[str]) -> Sequence[DataFile]:
    fs, path = file_system(url, {})
    with _converting_failures(url):
        try:
            if has_magic(path):
                matched = {
                    name: facts["type"] for name, facts in fs.glob(path, detail=True).items()
                }
                names = list(
                    dict.fromkeys(
                        file
                        for name in sorted(matched)
                        for file in _names_of(fs, name, matched[name], endings)
                    )
                )
            elif fs.info(path)["type"] == "directory":
                names = _names_in(fs, path, endings)
            else:
                return [UrlFile(url, fs, path)]
        except FileNotFoundError:
            names = []
    if not names:
        raise _no_files_error(url, endings)
    return [UrlFile(fs.unstrip_protocol(name), fs, name) for name in names]


def _names_in(fs: Any, folder: str, endings: Collection[str]) -> list[str]:
    listed = {
        facts["name"]: facts["type"]
        for facts in fs.ls(folder, detail=True)
        if facts["name"].rstrip("/") != folder.rstrip("/")
    }
    files = {PurePosixPath(name).name: name for name, kind in listed.items() if kind == "file"}
    if SPLITS in files:
        check_split(_read_small(fs, files[SPLITS]), folder)
    if STATE in files:
        names = data_files(_read_small(fs, files[STATE]), folder)
        if names is not None:
            check_complete([name for name in names if name not in files], folder)
            return [files[name] for name in names]
    data = [name for name in sorted(listed) if _is_data(PurePosixPath(name).name, endings)]
    return [file for name in data for file in _names_of(fs, name, listed[name], endings)]


def _read_small(fs: Any, path: str) -> bytes:
    with fs.open(path, "rb") as file:
        content: bytes = file.read(_MOST_LISTED)
    return content


def _names_of(fs: Any, name: str, kind: str, endings: Collection[str]) -> list[str]:
    return _names_in(fs, name, endings) if kind == "directory" else [name]


def _is_data(name: str, endings: Collection[str]) -> bool:
    """Return True if a file in a folder is data.

    Names with a leading dot or underscore are markers and drafts of other programs.
    """
    return PurePosixPath(name).suffix in endings and not name.startswith((".", "_"))


def _no_files_error(where: str, endings: Collection[str]) -> MissingDataError:
    return MissingDataError(
        "no data was found",
        where=where,
        expected=(
            f"a file that ends in {', '.join(sorted(endings))}, a folder that contains such files,"
            " or a pattern that matches some"
        ),
        got="no file",
        hint="Check the path; relative paths start at the current folder.",
    )


@contextmanager
def _converting_failures(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except failures() as error:
        raise unreachable(where, error) from without_secrets(error)
