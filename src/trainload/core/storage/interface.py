"""The interface of a store's files, which a folder and a remote file system implement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from trainload.core.canonical_json import sha256_file

BLOCK = 8 * 2**20
"""Maximum bytes of a file in memory at once."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

OnBytes = Callable[[int], None]
"""Callback with the number of further bytes that were transferred; it is negative if a transfer
begins again.
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store: its path, its size in bytes, and its modification time (seconds since
    1970), if known.
    """

    path: str
    size: int
    modified: float | None


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected size in bytes and sha256, in hex, of a local file that is to be sent."""

    size: int
    sha256: str


class Sink(Protocol):
    """A receiver of bytes, piece by piece."""

    def write(self, piece: bytes | memoryview, /) -> object:
        """Write the next bytes."""


class Upload(Protocol):
    """A file that is being written.

    It appears, complete, when `finish` returns, and never after `abandon`.
    """

    def write(self, piece: bytes | memoryview, /) -> object:
        """Write the next bytes."""

    def finish(self) -> None:
        """Make the file appear: all bytes were written."""

    def abandon(self) -> None:
        """Remove what was written, as far as the storage can be reached."""


class StoreFiles(Protocol):
    """The files of a store. Paths are relative to it, with parts joined by `/`.

    Laws: a file exists completely or not at all, even if its writer is killed; after `create`,
    `replace` or `send` has returned, every reader that begins later sees the file. Names that begin
    with `.` are temporary files, perhaps of a killed writer.

    All methods raise StorageError if the storage cannot be reached or denies access.
    """

    @property
    def url(self) -> str:
        """URL of the store, for messages."""

    @property
    def exclusive(self) -> bool:
        """True if `create` detects that another writer was first.

        This is tested, not assumed from the protocol.
        """

    def read(self, path: str, limit: int) -> bytes | None:
        """Return a file's bytes, or None if it does not exist.

        Raises UnsafePackageError if it has more than `limit` bytes.
        """

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, or None if it does not exist."""

    def version(self, path: str) -> str | None:
        """Return what the storage says changes with the file's content, such as its ETag; None if
        it says nothing that other machines would see too, or the file does not exist.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names directly in a folder, sorted, without those that begin with `.`; [] if
        there is no such folder.
        """

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """Yield all files below a folder, including those that begin with `.`."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists.

        Return True if the file is this one. `data` must differ from that of every other writer.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Write a file, replacing an existing one. Readers see either the old or the new file."""

    def delete(self, path: str) -> None:
        """Remove a file, if it exists."""

    def send(self, path: str, source: Path, expected: Expected, on_bytes: OnBytes) -> None:
        """Write a file from a local one.

        Raises IntegrityError, with nothing written, if the local file does not have the expected
        size and digest.
        """

    def receive(self, path: str, size: int) -> Iterator[bytes]:
        """Yield a file's bytes in blocks, at most `size` in total.

        Raises IntegrityError if there is no such file.
        """

    def part(self, path: str, start: int, stop: int) -> bytes:
        """Return a file's bytes [start, stop), or fewer if it ends before.

        Raises IntegrityError if there is no such file.
        """

    def upload(self, path: str, size: int) -> Upload:
        """Begin to write a file of `size` bytes piece by piece."""

    def free_bytes(self) -> int | None:
        """Return how much can be written, or None if that is unknown."""

    def prune(self, folder: str) -> None:
        """Remove a folder that has no files, with its empty subfolders. The root itself stays.

        Nobody may write there at the same time, but other processes may create the root.
        """


def send_file(files: StoreFiles, path: str, source: Path) -> None:
    """Send a local file as it is now. The errors are those of `StoreFiles.send`."""
    expected = Expected(source.stat().st_size, sha256_file(source))
    files.send(path, source, expected, lambda count: None)
