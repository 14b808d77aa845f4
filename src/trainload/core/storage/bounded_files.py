"""Files at a URL, with a time limit for every call.

fsspec has no timeouts for files that are being written, and the libraries behind it may wait for
ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trainload.core.errors import StorageError
from trainload.core.storage.interface import Expected, OnBytes, StoredFile, StoreFiles, Upload

SECONDS = 120.0
"""Time limit of one call: a query, or a part of a file."""

T = TypeVar("T")


class BoundedFiles:
    """`StoreFiles` whose calls raise StorageError after a time.

    Args:
        files: the files themselves.
        seconds: the time. Default: `SECONDS`.
    """

    def __init__(self, files: StoreFiles, seconds: float | None = None) -> None:
        self._files, self._seconds = files, seconds

    @property
    def url(self) -> str:
        """See `StoreFiles.url`."""
        return self._files.url

    @property
    def exclusive(self) -> bool:
        """See `StoreFiles.exclusive`."""
        return self._call("", lambda: self._files.exclusive)

    def read(self, path: str, limit: int) -> bytes | None:
        """See `StoreFiles.read`."""
        return self._call(path, self._files.read, path, limit)

    def size(self, path: str) -> int | None:
        """See `StoreFiles.size`."""
        return self._call(path, self._files.size, path)

    def version(self, path: str) -> str | None:
        """See `StoreFiles.version`."""
        return self._call(path, self._files.version, path)

    def names(self, folder: str) -> list[str]:
        """See `StoreFiles.names`."""
        return self._call(folder, self._files.names, folder)

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """See `StoreFiles.walk`."""
        yield from self._call(folder, lambda: list(self._files.walk(folder)))

    def create(self, path: str, data: bytes) -> bool:
        """See `StoreFiles.create`."""
        return self._call(path, self._files.create, path, data)

    def replace(self, path: str, data: bytes) -> None:
        """See `StoreFiles.replace`."""
        self._call(path, self._files.replace, path, data)

    def delete(self, path: str) -> None:
        """See `StoreFiles.delete`."""
        self._call(path, self._files.delete, path)

    def send(self, path: str, source: Path, expected: Expected, on_bytes: OnBytes) -> None:
        """See `StoreFiles.send`. The limit, at least `SECONDS`, is for the time between two of its
        parts.
        """
        moved = [time.monotonic()]

        def note(count: int) -> None:
            moved[0] = time.monotonic()
            on_bytes(count)

        limit = max(SECONDS, self._seconds or 0.0)
        _within(
            self._files.send,
            (path, source, expected, note),
            where=self._where(path),
            limit=limit,
            since=lambda: moved[0],
        )

    def receive(self, path: str, size: int) -> Iterator[bytes]:
        """See `StoreFiles.receive`. The limit is for each block."""
        blocks = self._files.receive(path, size)
        while (block := self._call(path, next, blocks, None)) is not None:
            yield block

    def part(self, path: str, start: int, stop: int) -> bytes:
        """See `StoreFiles.part`."""
        return self._call(path, self._files.part, path, start, stop)

    def upload(self, path: str, size: int) -> Upload:
        """See `StoreFiles.upload`."""
        return _BoundedUpload(self, path, self._call(path, self._files.upload, path, size))

    def free_bytes(self) -> int | None:
        """See `StoreFiles.free_bytes`."""
        return self._call("", self._files.free_bytes)

    def prune(self, folder: str) -> None:
        """See `StoreFiles.prune`."""
        self._call(folder, self._files.prune, folder)

    def _call(self, path: str, function: Callable[..., T], *arguments: Any) -> T:
        where = self._where(path)
        return within_limit(function, *arguments, where=where, seconds=self._seconds)

    def _where(self, path: str) -> str:
        return f"{self.url}/{path}".rstrip("/")


class _BoundedUpload:
    """An upload each of whose pieces has the time limit."""

    def __init__(self, files: BoundedFiles, path: str, upload: Upload) -> None:
        self._files, self._path, self._upload = files, path, upload

    def write(self, piece: bytes | memoryview, /) -> None:
        self._files._call(self._path, self._upload.write, piece)

    def finish(self) -> None:
        self._files._call(self._path, self._upload.finish)

    def abandon(self) -> None:
        self._files._call(self._path, self._upload.abandon)


def within_limit(
    function: Callable[..., T],
    *arguments: Any,
    where: str,
    seconds: float | None = None,
    who: str = "the store",
) -> T:
    """Call a function in a thread of its own, and return its result.

    `who` is the subject of the error if it takes too long.

    Raises:
        StorageError: it has not returned within this time (default: `SECONDS`); its thread is left
            running. Otherwise what it raises.
    """
    began = time.monotonic()
    limit = SECONDS if seconds is None else seconds
    return _within(function, arguments, where=where, limit=limit, since=lambda: began, who=who)


def _within(
    function: Callable[..., T],
    arguments: tuple[Any, ...],
    *,
    where: str,
    limit: float,
    since: Callable[[], float],
    who: str = "the store",
) -> T:
    """Call a function in a thread of its own, until it has not moved for `limit` seconds. `since`
    returns when it last moved.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            results.put((function(*arguments), None))
        except BaseException as error:  # noqa: BLE001  # raised by the caller
            results.put((None, error))

    threading.Thread(target=call, name=f"storage {where}", daemon=True).start()
    while True:
        try:
            result, error = results.get(timeout=max(0.0, since() + limit - time.monotonic()))
            break
        except queue.Empty:
            if time.monotonic() < since() + limit:
                continue
            raise StorageError(
                f"{who} does not respond", where=where, expected=f"a response within {limit:g} s"
            ) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None is one of its values then
