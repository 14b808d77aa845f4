"""Files of which every chunk of some bytes has a digest: who reads a part checks that part, and reads no more.

A file may be larger than a rank's share of it, so a digest of the whole would make every rank read every byte.
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
"""Bytes under one digest, unless a file says otherwise."""
LEAST_CHUNK = 2**16
CHUNKS_OF_A_FILE = 2**10
"""About as many digests are worth writing down of a file of which many will read a little each."""
SPAN = 16 * CHUNK
"""Bytes that are checked at a time where they are not kept, and that are read ahead of who reads on."""
FEW = 4
"""CHUNKs of bytes for which threads are not worth it."""
_READERS = 4
"""Threads that read and check: the disk answers one while others reckon digests, for which Python lets go of its lock."""


class ChunkDigests:
    """Takes a file's bytes in pieces of any length, and gives the sha256 of each `chunk` of them; the last chunk may be shorter."""

    def __init__(self, chunk: int | None = None) -> None:
        self._chunk = chunk or CHUNK
        self._digest = hashlib.sha256()
        self._open = 0
        self._found: list[str] = []

    def update(self, piece: bytes | memoryview) -> None:
        """The next bytes of the file."""
        view = memoryview(piece)
        while len(view):
            part = view[: self._chunk - self._open]
            self._digest.update(part)
            self._open += len(part)
            view = view[len(part) :]
            if self._open == self._chunk:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """The digests, in hex. Nothing may be added after."""
        if self._open:
            self._close()
        return tuple(self._found)

    def _close(self) -> None:
        self._found.append(self._digest.hexdigest())
        self._digest, self._open = hashlib.sha256(), 0


def chunk_for(size: int) -> int:
    """Bytes under one digest for a file of this size that will be read in parts: a power of two up to CHUNK."""
    wanted = min(LEAST_CHUNK, CHUNK)
    while wanted < CHUNK and wanted * CHUNKS_OF_A_FILE < size:
        wanted *= 2
    return wanted


def chunk_digests(file: BinaryIO) -> Iterator[str]:
    """The digests of a file that exists."""
    while block := file.read(CHUNK):
        yield hashlib.sha256(block).hexdigest()


class Ranges(Protocol):
    """A file that is open for reading, by places in it, from several threads."""

    def announce(self, start: int, stop: int) -> None:
        """These bytes will be read soon."""

    def fill(self, start: int, into: memoryview) -> None:
        """Reads bytes from `start` on, as many as `into` has. Where the file ends too early the rest stays as it was."""


class _FileRanges:
    """`Ranges` of a file of this machine's."""

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
    """An open file of this machine's, which is closed afterwards."""
    with file:
        yield _FileRanges(file.fileno())


class LastChunk:
    """The chunk that was last read in part, of whichever file shares this: what is read next often needs the same."""

    __slots__ = ("block", "file", "number")

    def __init__(self) -> None:
        self.file: ChunkedFile | None = None
        self.number = 0
        self.block = b""


class ChunkedFile:
    """A file that is read in parts.

    Laws: a byte is handed out only after the digest of its chunk was checked; each time, since the file may change meanwhile; nothing is
    kept but `last`.

    Args:
        opened: opens the file.
        size: its bytes.
        digests: of its chunks.
        damaged: the error for a chunk, by its number, whose digest is another one.
        last: shared by the files of one reader, so that it keeps one chunk however many they are.
        chunk: bytes under one digest.
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
        """Bytes."""
        return self._size

    def digests(self, start: int, stop: int) -> tuple[str, ...]:
        """Those of the chunks that hold bytes [start, stop)."""
        return tuple(self._digests[start // self._chunk : -(-stop // self._chunk)])

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). Raises: what `damaged` gives."""
        data = bytearray(stop - start)
        self.fill(start, memoryview(data))
        return bytes(data)

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """Reads bytes [start, stop) and keeps none. Raises: what `damaged` gives."""
        end = self._size if stop is None else stop
        for at in range(start, end, SPAN):
            self.fill(at, memoryview(bytearray(min(SPAN, end - at))), onward=True)

    def fill(self, start: int, into: memoryview, *, onward: bool = False) -> None:
        """Reads bytes from `start` on, as many as `into` has. `onward`: the reader goes on from there, so what comes next is fetched too.

        Chunks that lie wholly within are read and checked where they are to be, some at a time; of the others a copy is kept.

        Raises:
            what `damaged` gives. What `into` holds then is nothing to be used.
        """
        if not len(into):
            return
        stop, chunk = start + len(into), self._chunk
        numbers = range(start // chunk, -(-stop // chunk))
        inner = [number for number in numbers if start <= number * chunk and min((number + 1) * chunk, self._size) <= stop]
        with self._opened() as file:
            self._announce(file, start, stop, onward)
            for number in sorted(set(numbers) - set(inner)):
                low, high = max(start, number * chunk), min(stop, (number + 1) * chunk)
                block = memoryview(self._edge(number, file))
                into[low - start : high - start] = block[low - number * chunk : high - number * chunk]

            def read(group: range) -> None:
                low, high = group.start * chunk, min(group.stop * chunk, self._size)
                file.fill(low, into[low - start : high - start])
                for number in group:
                    self._check(number, into[number * chunk - start : min((number + 1) * chunk, high) - start])

            each = max(1, CHUNK // chunk)
            groups = [range(at, min(at + each, inner[-1] + 1)) for at in range(inner[0], inner[-1] + 1, each)] if inner else []
            if len(groups) < FEW:
                for group in groups:
                    read(group)
                return
            with ThreadPoolExecutor(_READERS) as pool:
                for _ in pool.map(read, groups):
                    pass

    def _announce(self, file: Ranges, start: int, stop: int, onward: bool) -> None:
        """Tell what will be read, so that the disk is at work while digests are reckoned."""
        file.announce(start, stop + (SPAN if onward and self._end == start else 0))
        self._end = stop

    def _edge(self, number: int, file: Ranges) -> bytes:
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
