"""A store at an fsspec URL.

Where one put is atomic (object stores), files are put under their names. Elsewhere they are put under a hidden name and moved.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from trainload.capture.errors import IntegrityError, StorageError, UnsafePackageError
from trainload.packaging.canonical import sha256_file
from trainload.packaging.manifest import FileEntry
from trainload.packaging.stores.folder import changed_file
from trainload.packaging.stores.places import BLOCK, OnBytes, StoredFile

_ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
"""Protocols whose put shows a file whole or not at all, and whose put with mode "create" may be conditional."""
_S3 = frozenset({"s3", "s3a"})
_EXTRAS = {"s3": "s3", "s3a": "s3"}
_PART = 8 * 2**20
"""Bytes of a part of an upload to S3, of which a few are in memory at once; s3fs would take ten of 50 MiB."""
_MAX_PARTS = 10_000
_MEMORY = threading.Lock()
"""fsspec's memory file system looks and then writes; only threads share it."""
_TRIES = 20
_AHEAD = 4
"""Blocks that are fetched at once."""


class RemoteFiles:
    """`StoreFiles` at an fsspec URL."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            # Listings are asked for anew: another process may have written since.
            self._fs, root = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, **options})
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            cure = f'Install it: pip install "trainload[{extra}]".' if extra else "Install the library that fsspec names."
            raise StorageError(f"what reaches {protocol}:// is not installed: {error}", where=url, cure=cure) from error
        except ValueError as error:
            raise StorageError(f"this is no URL of a store: {error}", where=url) from error
        self._root = root.rstrip("/")
        self._protocol = protocol
        self._atomic = protocol in _ATOMIC_PUT

    @property
    def url(self) -> str:
        """As it was given."""
        return self._url

    @cached_property
    def exclusive(self) -> bool:
        """Whether a second `create` of one file is refused. Some servers ignore the condition, so it is tried once."""
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
        """As `StoreFiles.read`."""
        size = self.size(path)
        if size is None:
            return None
        if size > limit:
            raise UnsafePackageError("a file of the store is too large", where=f"{self.url}/{path}", expected=f"at most {limit} bytes")
        try:
            return b"".join(self.receive(path, size))
        except IntegrityError:  # removed since
            return None

    def size(self, path: str) -> int | None:
        """As `StoreFiles.size`."""
        with self._reaching(path):
            try:
                info = self._fs.info(self._full(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return int(info["size"]) if info["type"] == "file" else None

    def names(self, folder: str) -> list[str]:
        """As `StoreFiles.names`."""
        with self._reaching(folder):
            try:
                found = self._fs.ls(self._full(folder), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found if str(path).strip("/") != self._full(folder).strip("/")}
        return sorted(name for name in names if not name.startswith("."))

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """As `StoreFiles.walk`."""
        with self._reaching(folder):
            try:
                found = self._fs.find(self._full(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return
        prefix = self._full("").lstrip("/")
        for path, info in sorted(found.items()):
            inner = str(path).lstrip("/").removeprefix(prefix).lstrip("/")
            stamp = info.get("LastModified") or info.get("mtime") or info.get("updated") or info.get("created")
            modified = stamp.timestamp() if hasattr(stamp, "timestamp") else stamp if isinstance(stamp, int | float) else None
            yield StoredFile(inner, int(info.get("size") or 0), modified)

    def create(self, path: str, data: bytes) -> bool:
        """As `StoreFiles.create`."""
        for _ in range(_TRIES):
            try:
                with self._locked():
                    self._fs.pipe_file(self._full(path), data, mode="create")
                return True
            except FileExistsError:
                break
            except _failures() as error:
                code = _code(error)
                if code in ("PreconditionFailed", "412"):
                    break
                if code in ("NotImplemented", "501"):
                    raise NotImplementedError(str(error)) from error
                if code not in ("ConditionalRequestConflict", "409"):  # two at once, neither of which was first: ask again
                    raise self._unreachable(path, error) from error
        # A put whose answer was lost is sent again, and then finds its own file.
        return self.size(path) == len(data) and self.read(path, len(data)) == data

    def replace(self, path: str, data: bytes) -> None:
        """As `StoreFiles.replace`."""
        with self._reaching(path), self._under_its_name(path) as name, self._locked():
            self._fs.pipe_file(name, data)

    def delete(self, path: str) -> None:
        """As `StoreFiles.delete`."""
        with self._reaching(path):
            try:
                self._fs.rm_file(self._full(path))
            except FileNotFoundError:
                return

    def send(self, path: str, source: Path, entry: FileEntry, on_bytes: OnBytes) -> None:
        """As `StoreFiles.send`. Read twice: once for its digest, and once to send it."""
        before = _stamp(source)
        digest = sha256_file(source)
        if before[0] != entry.size or digest != entry.sha256:
            raise changed_file(source, entry, before[0], digest)
        counter = _Counter(on_bytes)
        with self._reaching(path):
            try:
                with self._under_its_name(path) as name:
                    self._fs.put_file(str(source), name, callback=counter, **self._part_sizes(entry.size))
            except BaseException:
                counter.take_back()
                raise
        if _stamp(source) != before:
            self.delete(path)
            counter.take_back()
            raise IntegrityError("a file was changed while it was sent", where=str(source), cure="Write packages once; then push them.")

    def receive(self, path: str, size: int) -> Iterator[bytes]:
        """As `StoreFiles.receive`. A few blocks are on their way at once: each is a request of its own, and most of its time is waiting."""
        starts = iter(range(0, size, BLOCK))
        with ThreadPoolExecutor(_AHEAD) as pool:
            coming = deque(pool.submit(self._block, path, start, size) for start in islice(starts, _AHEAD))
            while coming:
                block = coming.popleft().result()
                if not block:
                    break
                yield block
                if (start := next(starts, None)) is not None:
                    coming.append(pool.submit(self._block, path, start, size))
            for block_to_come in coming:
                block_to_come.cancel()

    def _block(self, path: str, start: int, size: int) -> bytes:
        """The block that begins at `start`; b"" where the file ends before."""
        with self._reaching(path):
            try:
                return bytes(self._fs.cat_file(self._full(path), start=start, end=min(size, start + BLOCK)))
            except FileNotFoundError as error:
                raise IntegrityError("a file of the store is missing", where=f"{self.url}/{path}") from error
            except _failures() as error:
                if start and _code(error) in ("InvalidRange", "416"):
                    return b""
                raise

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/") if path else self._root

    def _locked(self) -> AbstractContextManager[object]:
        return _MEMORY if self._protocol == "memory" else nullcontext()

    def _part_sizes(self, size: int) -> dict[str, int]:
        return {"chunksize": max(_PART, -(-size // _MAX_PARTS)), "max_concurrency": 4} if self._protocol in _S3 else {}

    @contextmanager
    def _under_its_name(self, path: str) -> Iterator[str]:
        """Where to put a file so that it is then at `path`, whole."""
        full = self._full(path)
        if self._atomic:
            yield full
            return
        folder, _, name = full.rpartition("/")
        draft = f"{folder}/.{name}.{secrets.token_hex(8)}.part"
        self._fs.makedirs(folder, exist_ok=True)
        yield draft
        self._fs.mv(draft, full)

    @contextmanager
    def _reaching(self, path: str) -> Iterator[None]:
        try:
            yield
        except _failures() as error:
            raise self._unreachable(path, error) from error

    def _unreachable(self, path: str, error: BaseException) -> StorageError:
        if isinstance(error, PermissionError):
            return StorageError(f"the store refuses: {error}", where=f"{self.url}/{path}", cure="Check the credentials and their rights.")
        return StorageError(f"the store cannot be reached: {str(error) or type(error).__name__}", where=f"{self.url}/{path}")


class _Counter(Callback):  # type: ignore[misc]  # fsspec ships no types
    """Hands on how many bytes fsspec has sent."""

    def __init__(self, on_bytes: OnBytes) -> None:
        super().__init__()
        self._on_bytes = on_bytes
        self._sent = 0

    def relative_update(self, inc: int = 1) -> None:
        """fsspec's: so many bytes more."""
        self._sent += inc
        self._on_bytes(inc)

    def take_back(self) -> None:
        """What was sent is not there."""
        self._on_bytes(-self._sent)
        self._sent = 0


def _stamp(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _code(error: BaseException) -> str:
    """The server's code for an error of S3's, which s3fs hands on as the cause."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def _failures() -> tuple[type[BaseException], ...]:
    """What the libraries behind fsspec raise where a place cannot be reached; of those alone that are loaded."""
    named = (
        ("botocore.exceptions", "BotoCoreError"),
        ("botocore.exceptions", "ClientError"),
        ("aiohttp", "ClientError"),
        ("azure.core.exceptions", "AzureError"),
        ("gcsfs.retry", "HttpError"),
        ("google.auth.exceptions", "GoogleAuthError"),
    )
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in named)
    return (OSError, TimeoutError, *(kind for kind in loaded if isinstance(kind, type)))
