"""What a store asks of the place that it lies in, and the one that a URL names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

BLOCK = 8 * 2**20
"""Bytes of a file that are in memory at once."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

OnBytes = Callable[[int], None]
"""Told how many bytes more have been moved; the number is negative where a transfer begins again."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store: its path in it, its size in bytes, and when it was last written (seconds since 1970), where that is known."""

    path: str
    size: int
    modified: float | None


@dataclass(frozen=True, slots=True)
class Expected:
    """What a local file must be to be sent: its size in bytes and its sha256, in hexadecimal digits."""

    size: int
    sha256: str


class Sink(Protocol):
    """Takes bytes, one piece after another."""

    def write(self, piece: bytes | memoryview, /) -> object:
        """The next bytes."""


class StoreFiles(Protocol):
    """The files of a store. Paths are relative to it, parts joined by `/`.

    Laws: a file is there whole or not at all, whenever its writer is killed; what `create`, `replace` or `send` has returned from is seen
    by every reader that begins later. Names that begin with `.` are being written, or were left by a killed writer.

    All of them raise StorageError where the place cannot be reached, or refuses.
    """

    @property
    def url(self) -> str:
        """What the store is called in messages."""

    @property
    def exclusive(self) -> bool:
        """Whether `create` notices that another writer was first. It is found out, not believed."""

    def read(self, path: str, limit: int) -> bytes | None:
        """A file's bytes; None: there is no such file. UnsafePackageError: it has more than `limit` bytes."""

    def size(self, path: str) -> int | None:
        """A file's size in bytes; None: there is no such file."""

    def names(self, folder: str) -> list[str]:
        """The names of what lies directly in a folder, sorted, without those that begin with `.`; [] where there is no such folder."""

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """All files below a folder, those that begin with `.` too."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless there is one. Returns: whether the file is this one. `data` must be like no other writer's."""

    def replace(self, path: str, data: bytes) -> None:
        """Write a file, in the place of one that is there. Readers see the one or the other."""

    def delete(self, path: str) -> None:
        """Remove a file, if there is one."""

    def send(self, path: str, source: Path, expected: Expected, on_bytes: OnBytes) -> None:
        """Write a file from a local one. IntegrityError: that is not of the expected size and digest, and nothing was written."""

    def receive(self, path: str, size: int) -> Iterator[bytes]:
        """A file's bytes in blocks, `size` in all, or fewer. IntegrityError: there is no such file."""
