"""Files of which every CHUNK bytes have a digest: who reads a part checks that part, and reads no more.

A file may be larger than a rank's share of it, so a digest of the whole would make every rank read every byte.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from trainload.capture.errors import TrainloadError

CHUNK = 4 * 2**20
"""Bytes under one digest."""
SPAN = 16 * CHUNK
"""Bytes that are checked at a time where they are not kept, and that are read ahead of who reads on."""
FEW = 4
"""Chunks for which threads are not worth it."""
_READERS = 4
"""Threads that read and check: the disk answers one while others reckon digests, for which Python lets go of its lock."""


class ChunkDigests:
    """Takes a file's bytes in pieces of any length, and gives the sha256 of each CHUNK of them; the last chunk may be shorter."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._open = 0
        self._found: list[str] = []

    def update(self, piece: bytes | memoryview) -> None:
        """The next bytes of the file."""
        view = memoryview(piece)
        while len(view):
            part = view[: CHUNK - self._open]
            self._digest.update(part)
            self._open += len(part)
            view = view[len(part) :]
            if self._open == CHUNK:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """The digests, in hex. Nothing may be added after."""
        if self._open:
            self._close()
        return tuple(self._found)

    def _close(self) -> None:
        self._found.append(self._digest.hexdigest())
        self._digest, self._open = hashlib.sha256(), 0


def chunk_digests(file: BinaryIO) -> Iterator[str]:
    """The digests of a file that exists."""
    while block := file.read(CHUNK):
        yield hashlib.sha256(block).hexdigest()


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
        opened: opens the file, unbuffered or not.
        size: its bytes.
        digests: of its chunks.
        damaged: the error for a chunk, by its number, whose digest is another one.
        last: shared by the files of one reader, so that it keeps one chunk however many they are.
    """

    def __init__(
        self,
        opened: Callable[[], BinaryIO],
        size: int,
        digests: Sequence[str],
        damaged: Callable[[int], TrainloadError],
        last: LastChunk,
    ) -> None:
        self._opened, self._size, self._digests, self._damaged = opened, size, digests, damaged
        self._last = last
        self._end = -1

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    def digests(self, start: int, stop: int) -> tuple[str, ...]:
        """Those of the chunks that hold bytes [start, stop)."""
        return tuple(self._digests[start // CHUNK : -(-stop // CHUNK)])

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
        stop = start + len(into)
        numbers = range(start // CHUNK, -(-stop // CHUNK))
        with self._opened() as file:
            self._announce(file.fileno(), start, stop, onward)

            def read(number: int) -> None:
                low, high = number * CHUNK, min((number + 1) * CHUNK, self._size)
                _read_at(file.fileno(), low, into[low - start : high - start])
                self._demand(number, into[low - start : high - start])

            inner = [number for number in numbers if start <= number * CHUNK and min((number + 1) * CHUNK, self._size) <= stop]
            for number in sorted(set(numbers) - set(inner)):
                low, high = max(start, number * CHUNK), min(stop, (number + 1) * CHUNK)
                block = memoryview(self._edge(number, file.fileno()))
                into[low - start : high - start] = block[low - number * CHUNK : high - number * CHUNK]
            if len(inner) < FEW:
                for number in inner:
                    read(number)
                return
            with ThreadPoolExecutor(_READERS) as pool:
                for _ in pool.map(read, inner):
                    pass

    def _announce(self, descriptor: int, start: int, stop: int, onward: bool) -> None:
        """Tell the system what will be read, so that the disk is at work while digests are reckoned."""
        ahead = SPAN if onward and self._end == start else 0
        os.posix_fadvise(descriptor, start, stop - start + ahead, os.POSIX_FADV_WILLNEED)
        self._end = stop

    def _edge(self, number: int, descriptor: int) -> bytes:
        last = self._last
        if last.file is not self or last.number != number:
            block = bytearray(min(CHUNK, self._size - number * CHUNK))
            _read_at(descriptor, number * CHUNK, memoryview(block))
            self._demand(number, memoryview(block))
            last.file, last.number, last.block = self, number, bytes(block)
        return last.block

    def _demand(self, number: int, block: memoryview) -> None:
        if hashlib.sha256(block).hexdigest() != self._digests[number]:
            raise self._damaged(number)


def _read_at(descriptor: int, start: int, into: memoryview) -> None:
    """Read bytes of a file into memory. Where it ends too early the rest stays as it was, and the digest is another."""
    at = 0
    while at < len(into):
        count = os.preadv(descriptor, [into[at:]], start + at)
        if count == 0:
            return
        at += count
