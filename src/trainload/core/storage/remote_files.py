"""A store at an fsspec URL.

If a put is atomic (object stores), files are written under their final names. Otherwise they are
written under a hidden name and moved.
"""

from __future__ import annotations

import io
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback
from fsspec.spec import AbstractBufferedFile

from trainload.core.canonical_json import sha256_file
from trainload.core.credentials import without_secrets
from trainload.core.errors import IntegrityError, UnsafePackageError
from trainload.core.storage.filesystem import (
    VERSION_KEYS,
    failures,
    file_system,
    unreachable,
)
from trainload.core.storage.folder_files import changed_file
from trainload.core.storage.interface import BLOCK, Expected, OnBytes, StoredFile

_ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
"""Protocols whose put is atomic, and whose put with mode "create" may be conditional."""
_S3 = frozenset({"s3", "s3a"})
_PART = 8 * 2**20
"""Bytes of a part of an upload to S3, of which a few are in memory at once; the default of s3fs is
ten parts of 50 MiB.
"""
_STREAM_PART = 16 * 2**20
"""Bytes of a part of a streamed upload.

Such parts are sent one after another, so they are larger.
"""
_MAX_PARTS = 10_000
_MEMORY = threading.Lock()
"""Lock for fsspec's memory file system, whose exclusive create is not atomic.

Only threads of this process share it.
"""
_TRIES = 20
_AHEAD = 4
"""Number of blocks that are fetched concurrently."""


class RemoteFiles:
    """`StoreFiles` at an fsspec URL."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        protocol = url.partition("://")[0]
        self._fs, root = file_system(url, options)
        self._root = root.rstrip("/")
        self._protocol = protocol
        self._atomic = protocol in _ATOMIC_PUT

    @property
    def url(self) -> str:
        """The URL, without trailing slashes and with references for secrets."""
        return self._url

    @cached_property
    def exclusive(self) -> bool:
        """True if a second `create` of the same file fails.

        Some servers ignore the condition, so it is tested once.
        """
        if not self._atomic:
            return False
        probe = f"probes/{secrets.token_hex(16)}"
        try:
            return self.create(probe, b"1") and not self.create(probe, b"2")
        except NotImplementedError:
            return False
        finally:
            self.delete(probe)

    def read(self, path: str, limit: int) -> bytes | None:
        """Return a file's bytes; see `StoreFiles.read`.

        One request, so that a concurrent `replace` yields the old or the new file.
        """
        try:
            data = self.part(path, 0, limit + 1)
        except IntegrityError:
            return None
        if len(data) > limit:
            raise UnsafePackageError(
                "a file of the store is too large",
                where=f"{self.url}/{path}",
                expected=f"at most {limit} bytes",
            )
        return data

    def size(self, path: str) -> int | None:
        """Return a file's size; see `StoreFiles.size`."""
        info = self._info(path)
        return int(info["size"]) if info is not None and info["type"] == "file" else None

    def version(self, path: str) -> str | None:
        """Return a property that changes with a file's content; see `StoreFiles.version`."""
        info = self._info(path) or {}
        return next((f"{key}:{info[key]}" for key in VERSION_KEYS if info.get(key)), None)

    def _info(self, path: str) -> Mapping[str, Any] | None:
        """Return what the file system says of a path; None if nothing is there."""
        with self._translate_errors(path):
            try:
                found: Mapping[str, Any] = self._fs.info(self._full_path(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; see `StoreFiles.names`."""
        with self._translate_errors(folder):
            try:
                paths = self._fs.ls(self._full_path(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = {
            str(path).rstrip("/").rpartition("/")[2]
            for path in paths
            if str(path).strip("/") != self._full_path(folder).strip("/")
        }
        return sorted(name for name in names if not name.startswith("."))

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """Yield all files below a folder; see `StoreFiles.walk`."""
        with self._translate_errors(folder):
            try:
                entries = self._fs.find(self._full_path(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return
        prefix = self._full_path("").lstrip("/")
        for path, info in sorted(entries.items()):
            inner = str(path).lstrip("/").removeprefix(prefix).lstrip("/")
            stamp = (
                info.get("LastModified")
                or info.get("mtime")
                or info.get("updated")
                or info.get("created")
            )
            modified = (
                stamp.timestamp()
                if hasattr(stamp, "timestamp")
                else stamp
                if isinstance(stamp, int | float)
                else None
            )
            yield StoredFile(inner, int(info.get("size") or 0), modified)

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists; see `StoreFiles.create`."""
        for _ in range(_TRIES):
            try:
                with self._locked():
                    self._fs.pipe_file(self._full_path(path), data, mode="create")
                return True
            except FileExistsError:
                break
            except failures() as error:
                code = _code(error)
                if code in ("PreconditionFailed", "412"):
                    break
                if code in ("NotImplemented", "501"):
                    raise NotImplementedError(str(error)) from error
                # concurrent requests, none of which succeeded: retry
                if code not in ("ConditionalRequestConflict", "409"):
                    raise unreachable(f"{self.url}/{path}", error) from without_secrets(error)
        # A put whose response was lost is sent again, and then finds its own file.
        return self.size(path) == len(data) and self.read(path, len(data)) == data

    def replace(self, path: str, data: bytes) -> None:
        """Write or replace a file; see `StoreFiles.replace`."""
        with self._translate_errors(path), self._under_its_name(path) as name, self._locked():
            self._fs.pipe_file(name, data)

    def delete(self, path: str) -> None:
        """Remove a file; see `StoreFiles.delete`."""
        with self._translate_errors(path):
            try:
                self._fs.rm_file(self._full_path(path))
            except FileNotFoundError:
                return

    def send(self, path: str, source: Path, expected: Expected, on_bytes: OnBytes) -> None:
        """Write a file from a local one; see `StoreFiles.send`.

        It is read twice: once for its digest, and once to send it.
        """
        before = _stamp(source)
        digest = sha256_file(source)
        if before[0] != expected.size or digest != expected.sha256:
            raise changed_file(source, expected, before[0], digest)
        counter = _Counter(on_bytes)
        with self._translate_errors(path):
            try:
                with self._under_its_name(path) as name:
                    self._fs.put_file(
                        str(source), name, callback=counter, **self._part_sizes(expected.size)
                    )
            except BaseException:
                counter.take_back()
                raise
        if _stamp(source) != before:
            self.delete(path)
            counter.take_back()
            raise IntegrityError(
                "a file changed while it was being sent",
                where=str(source),
                hint="Push it again, and do not change the package meanwhile.",
            )

    def upload(self, path: str, size: int) -> RemoteUpload:
        """Start a streamed write of a file of `size` bytes.

        Raises StorageError as `StoreFiles`; so do the methods of `Upload`.
        """
        with self._translate_errors(path):
            name = self._first_name(path)
            part = max(_STREAM_PART, -(-size // _MAX_PARTS))
            if size < part or self._protocol == "memory":
                return RemoteUpload(self, path, name, None)
            return RemoteUpload(
                self,
                path,
                name,
                self._fs.open(name, "wb", block_size=part, autocommit=not self._atomic),
            )

    def receive(self, path: str, size: int) -> Iterator[bytes]:
        """Yield a file's bytes; see `StoreFiles.receive`.

        A few blocks are requested concurrently, since each request mostly waits.
        """
        starts = iter(range(0, size, BLOCK))
        with ThreadPoolExecutor(_AHEAD) as pool:
            coming = deque(
                pool.submit(self.part, path, start, min(size, start + BLOCK))
                for start in islice(starts, _AHEAD)
            )
            while coming:
                block = coming.popleft().result()
                if not block:
                    break
                yield block
                if (start := next(starts, None)) is not None:
                    coming.append(pool.submit(self.part, path, start, min(size, start + BLOCK)))
            for block_to_come in coming:
                block_to_come.cancel()

    def part(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file, fewer if it ends before.

        Raises IntegrityError if there is no such file.
        """
        with self._translate_errors(path):
            try:
                return bytes(self._fs.cat_file(self._full_path(path), start=start, end=stop))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                raise IntegrityError(
                    "a file of the store is missing", where=f"{self.url}/{path}"
                ) from without_secrets(error)
            except failures() as error:
                if _code(error) in ("InvalidRange", "416") and (start or self.size(path) == 0):
                    return b""
                raise

    def free_bytes(self) -> int | None:
        """See `StoreFiles.free_bytes`. It is unknown."""
        return None

    def prune(self, folder: str) -> None:
        """See `StoreFiles.prune`. Object stores have no folders; those of other protocols stay."""

    def _full_path(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/") if path else self._root

    def _locked(self) -> AbstractContextManager[object]:
        return _MEMORY if self._protocol == "memory" else nullcontext()

    def _part_sizes(self, size: int) -> dict[str, int]:
        return (
            {"chunksize": max(_PART, -(-size // _MAX_PARTS)), "max_concurrency": 4}
            if self._protocol in _S3
            else {}
        )

    @contextmanager
    def _under_its_name(self, path: str) -> Iterator[str]:
        """Yield the name under which to write a file, and rename it to `path` afterwards."""
        name = self._first_name(path)
        yield name
        self._rename(name, path)

    def _first_name(self, path: str) -> str:
        """Return the name under which a file is written first."""
        full = self._full_path(path)
        if self._atomic:
            return full
        folder, _, name = full.rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        return f"{folder}/.{name}.{secrets.token_hex(8)}.part"

    def _rename(self, first: str, path: str) -> None:
        if first != self._full_path(path):
            self._fs.mv(first, self._full_path(path))

    @contextmanager
    def _translate_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except failures() as error:
            raise unreachable(f"{self.url}/{path}", error) from without_secrets(error)


class RemoteUpload:
    """A streamed write of a file.

    The file exists, complete, when `finish` returns, and never after `abandon`.

    About three parts are in memory, or all of a file that is smaller than one part.
    """

    def __init__(self, files: RemoteFiles, path: str, name: str, file: Any) -> None:
        self._files, self._path, self._name = files, path, name
        self._small = io.BytesIO() if file is None else None
        self._file = file

    def write(self, piece: bytes | memoryview, /) -> None:
        """Write the next bytes."""
        if self._small is not None:
            self._small.write(piece)
            return
        with self._files._translate_errors(self._path):
            self._file.write(piece)

    def finish(self) -> None:
        """Complete the file after all bytes were written."""
        files = self._files
        with files._translate_errors(self._path):
            if self._small is not None:
                with files._locked():
                    files._fs.pipe_file(self._name, self._small.getvalue())
            else:
                self._file.close()
                if files._atomic:
                    self._file.commit()
            files._rename(self._name, self._path)

    def abandon(self) -> None:
        """Discard what was sent, as far as the storage can be reached."""
        if self._small is not None:
            return
        with suppress(*failures()):
            if isinstance(self._file, AbstractBufferedFile):
                # otherwise it would upload its buffer when it is garbage collected
                self._file.closed = True
            if self._files._atomic:
                self._file.discard()
            else:
                self._files._fs.rm_file(self._name)


class _Counter(Callback):  # type: ignore[misc]  # fsspec ships no types
    """Adapter from fsspec's callbacks to `OnBytes`."""

    def __init__(self, on_bytes: OnBytes) -> None:
        super().__init__()
        self._on_bytes = on_bytes
        self._sent = 0

    def relative_update(self, inc: int = 1) -> None:
        """Count further bytes; called by fsspec."""
        self._sent += inc
        self._on_bytes(inc)

    def take_back(self) -> None:
        """Subtract all counted bytes, because the upload failed."""
        self._on_bytes(-self._sent)
        self._sent = 0


def _stamp(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _code(error: BaseException) -> str:
    """Return the server's error code of an S3 error, which s3fs keeps as the cause."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""
