"""A file that grows, at a place whose files cannot be appended to: as numbered parts.

    events/00000065.jsonl                the 65th part
    events/00000001-00000064.jsonl       parts 1 to 64, merged

Parts are created exclusively, so no two writers create the same one. 64 parts are merged into one,
and 64 of those again, so that a reader of a long file opens few.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainload.core.errors import ConflictError, IntegrityError
from trainload.core.storage.interface import StoreFiles

MERGED = 64
"""Number of parts that are merged into one."""
_LARGEST_MERGED = 64 * 2**20
"""Bytes of the largest part that is made by merging; it is in memory while it is written."""
_LARGEST = 8 * 2**20
"""Bytes of the largest part that is not merged."""
_AT_ONCE = 8
"""Number of merged parts that are removed concurrently."""
_NAME = re.compile(r"([0-9]{8})(?:-([0-9]{8}))?(\.\w+)")


class NumberedParts:
    """A file on this machine, and its parts elsewhere.

    One thread may call `publish` while another one calls `merge`.

    Args:
        files: where the parts are.
        folder: path of their folder there.
        path: the file on this machine; it is read by `publish`, and written by `fetch`.
        is_shared: several processes append to the parts. What each of them appends stays in order.
    """

    def __init__(
        self, files: StoreFiles, folder: str, path: Path, *, is_shared: bool = False
    ) -> None:
        self._files, self._folder, self._path = files, folder, path
        self._is_shared = is_shared
        self._suffix = path.suffix
        self._offsets = {0: 0}
        self._size = self._last = self._merged = 0
        self._unconfirmed = b""

    @property
    def last(self) -> int:
        """Number of the last part that is known; 0 if there is none."""
        return self._last

    @property
    def size(self) -> int:
        """Number of the file's bytes that are in parts."""
        return self._size

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
        self._merged = self._last - self._last % MERGED

    def skip(self) -> None:
        """Begin a new file on this machine, which follows the parts that exist."""
        self._begin_after(max((last for _, last in self._parts()), default=0), 0)

    def match(self, last: int) -> bool:
        """Find out how much of the file is in the parts after number `last`; the rest follows the
        parts that exist. Return True if these parts have nothing else.

        Raises:
            StorageError: the parts cannot be read.
            OSError: the file cannot be read.
        """
        self._begin_after(last, 0)
        parts = list(self._parts())
        with self._path.open("rb") as file:
            while (found := self._next_of(parts)) is not None:
                size = self._files.size(self._part_path(*found))
                if size is None:  # it was merged meanwhile
                    return self.match(last)
                data = b"".join(self._files.receive(self._part_path(*found), size))
                if found[0] != self._last + 1 or file.read(len(data)) != data:
                    self._begin_after(max(each[1] for each in parts), self.size)
                    return False
                self._note(found[1], self.size + len(data))
        return True

    def _begin_after(self, last: int, size: int) -> None:
        self._offsets = {last: size}
        self._size, self._last, self._merged = size, last, last - last % MERGED

    def _note(self, last: int, size: int) -> None:
        """Note that the parts up to number `last` have this many bytes of the file."""
        self._offsets[last] = size
        self._size, self._last = size, last

    def publish(self, *, is_whole: bool = False) -> None:
        """Create parts of what has been appended to the file so far.

        Args:
            is_whole: True to include an incomplete line at the end.

        Raises:
            ConflictError: another writer has created the next part, and the parts are not shared.
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
                if len(data) < _LARGEST and not is_whole:
                    data = data[: data.rfind(b"\n") + 1]
                if not data:
                    return
                self._create(data)

    def _create(self, data: bytes) -> None:
        # If its response is lost, the part may exist: it is created again with the same bytes.
        self._unconfirmed = data
        while not self._files.create(path := self._part_path(self._last + 1, self._last + 1), data):
            if not self._is_shared:
                self._unconfirmed = b""
                raise ConflictError(
                    "another process writes this file",
                    where=f"{self._files.url}/{path}",
                    expected="no such part",
                    hint="Let one process at a time drive the run.",
                )
            self._begin_after(max(last for _, last in self._parts()), self.size)
        self._unconfirmed = b""
        self._note(self._last + 1, self.size + len(data))

    def remove_last(self) -> None:
        """Remove the last part that this object has created. Nothing can be published afterwards.

        Raises:
            StorageError: it cannot be removed.
        """
        self._files.delete(self._part_path(self._last, self._last))

    def merge(self) -> None:
        """Merge parts that were created, where there are enough of them. What is merged is removed.

        Raises:
            StorageError: the parts cannot be written or removed.
            OSError: the file cannot be read.
        """
        while self._merged + MERGED <= self._last:
            last, offsets = self._merged + MERGED, self._offsets
            first = _first_to_merge(offsets, last)
            if first is not None:
                self._merge(offsets, first, last)
            self._merged = last

    def _merge(self, offsets: dict[int, int], first: int, last: int) -> None:
        start = offsets[first - 1]
        with self._path.open("rb") as file:
            file.seek(start)
            data = file.read(offsets[last] - start)
        self._files.replace(self._part_path(first, last), data)
        merged = [
            self._part_path(*each)
            for each in self._parts()
            if first <= each[0] and each[1] <= last and each != (first, last)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(self._files.delete, merged))
        for number in range(first, last):
            offsets.pop(number, None)

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
            self._note(last, os.fstat(file.fileno()).st_size)
        return True

    def _parts(self) -> Iterator[tuple[int, int]]:
        for name in self._files.names(self._folder):
            match = _NAME.fullmatch(name)
            if match is not None and match[3] == self._suffix:
                yield int(match[1]), int(match[2] or match[1])

    def _part_path(self, first: int, last: int) -> str:
        numbers = f"{first:08d}" if first == last else f"{first:08d}-{last:08d}"
        return f"{self._folder}/{numbers}{self._suffix}"


def _first_to_merge(offsets: Mapping[int, int], last: int) -> int | None:
    """Return the first number of the largest part that may end with this number; None if that would
    be too large, or begin before what this process knows.

    Args:
        offsets: number of a part -> bytes of the file up to its end.
        last: the number.
    """
    first, count = None, MERGED
    while last % count == 0:
        start = offsets.get(last - count)
        if start is not None and offsets[last] - start <= _LARGEST_MERGED:
            first = last - count + 1
        count *= MERGED
    return first
