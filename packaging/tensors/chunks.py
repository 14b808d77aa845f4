"""Files with a digest for every chunk, so that a part can be read and checked without the rest.

A rank's share may be only a part of a file: with a digest of the whole file, every rank would have
to read every byte.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO, Protocol

from trainload.core.errors import TrainloadError

CHUNK = 4 * 2**20
"""Bytes per chunk, unless a file says otherwise."""
LEAST_CHUNK = 2**16
CHUNKS_OF_A_FILE = 2**10
"""Approximate number of chunks of a file that many processes read in small parts."""
SPAN = 16 * CHUNK
"""Bytes per block when a file is only checked, and bytes of read-ahead for sequential reads."""
FEW = 4
"""Number of chunk groups below which threads are not worth their cost."""
_READERS = 4
"""Threads that read and check: one waits for the disk while others compute digests, for which
Python releases the GIL.
"""


class ChunkDigests:
    """Incremental sha256 of each `chunk` bytes of a file that arrives in pieces of any length; the
    last chunk may be shorter.
    """

    def __init__(self, chunk: int | None = None) -> None:
        self._chunk = chunk or CHUNK
        self._digest = hashlib.sha256()
        self._open = 0
        self._found: list[str] = []

    def update(self, piece: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(piece)
        while len(view):
            part = view[: self._chunk - self._open]
            self._digest.update(part)
            self._open += len(part)
            view = view[len(part) :]
            if self._open == self._chunk:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """Return the digests, in hex. No bytes may be added afterwards."""
        if self._open:
            self._close()
        return tuple(self._found)

    def _close(self) -> None:
        self._found.append(self._digest.hexdigest())
        self._digest, self._open = hashlib.sha256(), 0


def chunk_for(size: int) -> int:
    """Return the chunk size for a file of `size` bytes that will be read in parts: a power of two
    up to CHUNK.
    """
    chunk = min(LEAST_CHUNK, CHUNK)
    while chunk < CHUNK and chunk * CHUNKS_OF_A_FILE < size:
        chunk *= 2
    return chunk


def chunk_digests(file: BinaryIO) -> Iterator[str]:
    """Yield the digests of an open file's chunks."""
    while block := file.read(CHUNK):
        yield hashlib.sha256(block).hexdigest()


class Ranges(Protocol):
    """A file that is open for reads at given offsets, from several threads."""

    def announce(self, start: int, stop: int) -> None:
        """Announce that bytes [start, stop) will be read soon."""

    def fill(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on.

        If the file ends too early, the rest of `into` is unchanged.
        """


class _FileRanges:
    """`Ranges` of a local file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def announce(self, start: int, stop: int) -> None:
        os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)

    def fill(self, start: int, into: memoryview) -> None:
        at = 0
        while at < len(into):
            count = os.preadv(self._descriptor, [into[at:]], start + at)
            if count == 0:
                return
            at += count


@contextmanager
def ranges_of(file: BinaryIO) -> Iterator[Ranges]:
    """Yield the ranges of an open local file, which is closed afterwards."""
    with file:
        yield _FileRanges(file.fileno())


class LastChunk:
    """The chunk that was last read in part, among the files that share this object: the next read
    often needs it again.
    """

    __slots__ = ("block", "file", "number")

    def __init__(self) -> None:
        self.file: ChunkedFile | None = None
        self.number = 0
        self.block = b""


class ChunkedFile:
    """A file that is read in parts.

    Laws: a byte is returned only after the digest of its chunk was checked, each time, since the
    file may change meanwhile; only `last` is cached.

    Args:
        opened: opens the file.
        size: size of the file in bytes.
        digests: digests of its chunks.
        damaged: returns the error for a chunk number whose digest does not match.
        last: shared by the files of one reader, so that only one chunk is cached for all of them.
        chunk: bytes per chunk.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Ranges]],
        size: int,
        digests: Sequence[str],
        damaged: Callable[[int], TrainloadError],
        last: LastChunk,
        chunk: int | None = None,
    ) -> None:
        self._opened, self._size, self._digests, self._damaged = opened, size, digests, damaged
        self._last, self._chunk = last, chunk or CHUNK
        self._end = -1

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._size

    def digests(self, start: int, stop: int) -> tuple[str, ...]:
        """Return the digests of the chunks that contain bytes [start, stop)."""
        return tuple(self._digests[start // self._chunk : -(-stop // self._chunk)])

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop).

        Raises the error of `damaged` if a chunk's digest does not match.
        """
        data = bytearray(stop - start)
        self.fill(start, memoryview(data))
        return bytes(data)

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """Check bytes [start, stop) without keeping them.

        Raises the error of `damaged` if a chunk's digest does not match.
        """
        end = self._size if stop is None else stop
        for at in range(start, end, SPAN):
            self.fill(at, memoryview(bytearray(min(SPAN, end - at))), onward=True)

    def fill(self, start: int, into: memoryview, *, onward: bool = False) -> None:
        """Fill `into` with the bytes from `start` on.

        `onward` announces sequential reads, for which the next bytes are read ahead.

        Chunks that are wholly inside the range are read directly into `into` and checked there,
        several at a time; the chunks at the edges are read into a copy.

        Raises:
            TrainloadError: the error of `damaged`. The contents of `into` must not be used then.
        """
        if not len(into):
            return
        stop, chunk = start + len(into), self._chunk
        numbers = range(start // chunk, -(-stop // chunk))
        inner = [
            number
            for number in numbers
            if start <= number * chunk and min((number + 1) * chunk, self._size) <= stop
        ]
        with self._opened() as file:
            self._announce(file, start, stop, onward)
            for number in sorted(set(numbers) - set(inner)):
                low, high = max(start, number * chunk), min(stop, (number + 1) * chunk)
                block = memoryview(self._read_edge(number, file))
                into[low - start : high - start] = block[
                    low - number * chunk : high - number * chunk
                ]

            def read(group: range) -> None:
                low, high = group.start * chunk, min(group.stop * chunk, self._size)
                file.fill(low, into[low - start : high - start])
                for number in group:
                    self._check(
                        number,
                        into[number * chunk - start : min((number + 1) * chunk, high) - start],
                    )

            chunks_per_group = max(1, CHUNK // chunk)
            groups = (
                [
                    range(at, min(at + chunks_per_group, inner[-1] + 1))
                    for at in range(inner[0], inner[-1] + 1, chunks_per_group)
                ]
                if inner
                else []
            )
            if len(groups) < FEW:
                for group in groups:
                    read(group)
                return
            with ThreadPoolExecutor(_READERS) as pool:
                for _ in pool.map(read, groups):
                    pass

    def _announce(self, file: Ranges, start: int, stop: int, onward: bool) -> None:
        """Announce the next reads, so that the disk works while digests are computed."""
        file.announce(start, stop + (SPAN if onward and self._end == start else 0))
        self._end = stop

    def _read_edge(self, number: int, file: Ranges) -> bytes:
        last = self._last
        if last.file is not self or last.number != number:
            block = bytearray(min(self._chunk, self._size - number * self._chunk))
            file.fill(number * self._chunk, memoryview(block))
            self._check(number, memoryview(block))
            last.file, last.number, last.block = self, number, bytes(block)
        return last.block

    def _check(self, number: int, block: memoryview) -> None:
        if hashlib.sha256(block).hexdigest() != self._digests[number]:
            raise self._damaged(number)
