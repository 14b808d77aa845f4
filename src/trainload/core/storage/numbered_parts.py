"""A file that grows, at a place whose files cannot be appended to: as numbered parts.

    events/00000065.jsonl                the 65th part
    events/00000001-00000064.jsonl       parts 1 to 64, merged

Parts are created exclusively, so two writers cannot both append. 64 parts are merged into one, and
64 of those again, so that a reader of a long file opens few.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainload.core.errors import ConflictError, IntegrityError
from trainload.core.storage.interface import StoreFiles

MERGED = 64
"""Number of parts that are merged into one."""
_LARGEST_MERGED = 64 * 2**20
"""Bytes of the largest part that is made by merging; it is in memory while it is written."""
_LARGEST = 8 * 2**20
"""Bytes of the largest part that is not merged."""
_NAME = re.compile(r"([0-9]{8})(?:-([0-9]{8}))?(\.\w+)")


class NumberedParts:
    """A file on this machine, and its parts elsewhere.

    Args:
        files: where the parts are.
        folder: path of their folder there.
        path: the file on this machine; it is read by `publish`, and written by `fetch`.
    """

    def __init__(self, files: StoreFiles, folder: str, path: Path) -> None:
        self._files, self._folder, self._path = files, folder, path
        self._suffix = path.suffix
        self._offsets = {0: 0}
        self._last = 0
        self._unconfirmed = b""

    @property
    def size(self) -> int:
        """Number of the file's bytes that are in parts."""
        return self._offsets[self._last]

    def fetch(self) -> None:
        """Append the parts to the file that it does not have yet; begin the file anew at the first
        call.

        Raises:
            StorageError: the parts cannot be read.
            OSError: the file cannot be written.
        """
        is_whole = False
        while not is_whole:
            parts, is_whole = list(self._parts()), True
            while is_whole and (found := self._next_of(parts)) is not None:
                is_whole = self._append(*found)

    def skip(self) -> None:
        """Begin a new file on this machine, which follows the parts that exist."""
        self._last = max((last for _, last in self._parts()), default=0)
        self._offsets = {self._last: 0}

    def publish(self) -> None:
        """Create parts of what has been appended to the file so far, but for an incomplete line.

        Raises:
            ConflictError: another writer has created the next part.
            StorageError: a part cannot be written.
            OSError: the file cannot be read.
        """
        if not self._path.exists():
            return
        if self._unconfirmed:
            self._create(self._unconfirmed)
        with self._path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            while self.size < end:
                file.seek(self.size)
                data = file.read(min(_LARGEST, end - self.size))
                if len(data) < _LARGEST:
                    data = data[: data.rfind(b"\n") + 1]
                if not data:
                    return
                self._create(data)

    def _create(self, data: bytes) -> None:
        number = self._last + 1
        path = self._part_path(number, number)
        # If its response is lost, the part may exist: it is created again with the same bytes.
        self._unconfirmed = data
        if not self._files.create(path, data):
            raise ConflictError(
                "another process writes this file",
                where=f"{self._files.url}/{path}",
                expected="no such part",
                hint="Let one process at a time drive the run.",
            )
        self._unconfirmed = b""
        self._offsets[number] = self.size + len(data)
        self._last = number
        self._merge()

    def _merge(self) -> None:
        """Merge the last parts, if there are enough of them. What is merged is removed."""
        count = 1
        while self._last % (count * MERGED) == 0:
            count *= MERGED
        first = self._last - count + 1
        start = self._offsets.get(first - 1)
        if count == 1 or start is None or self.size - start > _LARGEST_MERGED:
            return
        with self._path.open("rb") as file:
            file.seek(start)
            data = file.read(self.size - start)
        self._files.replace(self._part_path(first, self._last), data)
        for each in self._parts():
            if first <= each[0] and each[1] <= self._last and each != (first, self._last):
                self._files.delete(self._part_path(*each))

    def _next_of(self, parts: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the first and the last number of the largest part that follows what is known."""
        following = [each for each in parts if each[0] <= self._last + 1 <= each[1]]
        return max(following, key=lambda each: each[1], default=None)

    def _append(self, first: int, last: int) -> bool:
        """Append a part to the file, without what the file has already. Return False if the part
        was merged meanwhile.
        """
        path = self._part_path(first, last)
        size = self._files.size(path)
        if size is None:
            return False
        skipped = self.size - self._offsets[first - 1]
        with self._path.open("wb" if self._last == 0 else "r+b") as file:
            file.seek(self.size)
            try:
                for block in self._files.receive(path, size):
                    file.write(block[skipped:])
                    skipped = max(0, skipped - len(block))
            except IntegrityError:
                file.truncate(self.size)
                return False
            except BaseException:
                file.truncate(self.size)
                raise
            file.flush()
            self._offsets[last] = os.fstat(file.fileno()).st_size
        self._last = last
        return True

    def _parts(self) -> Iterator[tuple[int, int]]:
        for name in self._files.names(self._folder):
            match = _NAME.fullmatch(name)
            if match is not None and match[3] == self._suffix:
                yield int(match[1]), int(match[2] or match[1])

    def _part_path(self, first: int, last: int) -> str:
        numbers = f"{first:08d}" if first == last else f"{first:08d}-{last:08d}"
        return f"{self._folder}/{numbers}{self._suffix}"
