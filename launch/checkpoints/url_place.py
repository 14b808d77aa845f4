"""Checkpoints at an fsspec URL. Object stores have no atomic rename, so a checkpoint is published by writing its index last.

    step-N/index.json                     makes it a checkpoint
    step-N/<attempt>-<save>/rank-...      its shards, as the index names them; markers and the notice until it is published

Shard names are unique to an attempt and a save. Files that no index names are garbage: retention removes
an index before its shards, and an attempt removes the leftovers of others when it begins.
"""

from __future__ import annotations

import queue
import re
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from trainload.core.canonical_json import MAX_BYTES
from trainload.core.errors import CheckpointError, IntegrityError, StorageError
from trainload.core.storage.interface import NO_OPTIONS, Sink
from trainload.core.storage.remote_files import RemoteFiles, Upload
from trainload.launching.checkpoints.index import INDEX, CheckpointIndex, decode_index, encode_index, folder_name, step_of
from trainload.packaging.tensors.chunks import Ranges

_ANSWER_SECONDS = 120.0
"""Timeout of one request, or of one part of a file."""
_AT_ONCE = 8
_NOTICE = "given-up"
_DONE = ".done"
_SHARD = ".safetensors"
_OURS = re.compile(r"(?P<folder>step-[0-9]{8,})/(?:index\.json|(?P<attempt>[A-Za-z0-9._-]+)-(?P<save>[0-9]{8})/[^/]+)")
"""Pattern of the paths that runs write. Nothing else is ever removed."""

T = TypeVar("T")


class _Place:
    """Files at a URL. Every operation has a timeout."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._files = RemoteFiles(url, NO_OPTIONS)

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes; None if the file does not exist."""
        return _answer(self._files.read, path, MAX_BYTES, where=self._at(path))

    def size(self, path: str) -> int | None:
        """Return a file's size; None if the file does not exist."""
        return _answer(self._files.size, path, where=self._at(path))

    def part(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a file, fewer if it ends earlier. Raises FileNotFoundError if it does not exist."""
        try:
            return _answer(self._files.part, path, start, stop, where=self._at(path))
        except IntegrityError as error:
            raise FileNotFoundError(f"there is no {self._at(path)}") from error

    def put(self, path: str, data: bytes) -> None:
        """Write a file, replacing an existing one."""
        _answer(self._files.replace, path, data, where=self._at(path))

    def names(self, folder: str) -> list[str]:
        """Return the names of the direct children of a folder."""
        return _answer(self._files.names, folder, where=self._at(folder))

    def walk(self, folder: str) -> dict[str, int]:
        """Return path -> size of every file below a folder."""
        return _answer(lambda: {file.path: file.size for file in self._files.walk(folder)}, where=self._at(folder))

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files; those that do not exist are ignored."""
        for _ in _at_once(lambda path: _answer(self._files.delete, path, where=self._at(path)), list(paths)):
            pass

    def read_all(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several files; None for those that do not exist."""
        return list(_at_once(self.read, paths))

    @contextmanager
    def writing(self, path: str, size: int) -> Iterator[Sink]:
        """Yield a sink for the `size` bytes of a new file."""
        where = self._at(path)
        upload: Upload = _answer(self._files.upload, path, size, where=where)
        try:
            yield _Bounded(upload, where)
            _answer(upload.finish, where=where)
        except BaseException:
            with suppress(StorageError):
                _answer(upload.abandon, where=where)
            raise

    def _at(self, path: str) -> str:
        return f"{self.url}/{path}".rstrip("/")


class UrlPlace:
    """A `CheckpointPlace` at a URL."""

    pauses = (0.1, 2.0)

    def __init__(self, url: str) -> None:
        self._place = _Place(url)

    @property
    def where(self) -> str:
        return self._place.url

    def begin(self) -> None:
        """Do nothing: object stores need no folders."""

    def tidy(self, attempt: str) -> None:
        files: dict[str, list[re.Match[str]]] = defaultdict(list)
        for path in self._place.walk(""):
            match = _OURS.fullmatch(path)
            if match:
                files[match["folder"]].append(match)
        for folder, found in files.items():
            strange = {match[0] for match in found if match["attempt"] not in (None, attempt)}
            if any(match["attempt"] is None for match in found):
                strange -= self._needed(folder, strange)
            self._place.delete(sorted(strange))

    def _needed(self, folder: str, paths: set[str]) -> set[str]:
        """Return those files in a checkpoint's folder that its index may name."""
        shards = {path for path in paths if path.endswith(_SHARD)}
        if len({path.split("/")[1] for path in paths}) <= 1:  # published once: all shards are its own
            return shards
        try:
            return {f"{folder}/{file.name}" for file in self._index(folder).files}
        except CheckpointError:
            return shards  # the index cannot be read, so keep all of them

    def _index(self, folder: str) -> CheckpointIndex:
        path = f"{folder}/{INDEX}"
        return decode_index(self._place.read(path) or b"", f"{self.where}/{path}")

    def published(self) -> Mapping[int, str]:
        steps = {step: name for name in self._place.names("") if (step := step_of(name)) is not None}
        folders = [steps[step] for step in sorted(steps)]
        there = _at_once(lambda folder: INDEX in self._place.names(folder), folders)
        return {step: f"{self.where}/{steps[step]}" for step, whole in zip(sorted(steps), there, strict=True) if whole}

    def draft(self, step: int, attempt: str, save: int) -> UrlDraft:
        return UrlDraft(self._place, step, attempt, save)

    def delete(self, step: int, attempt: str) -> None:
        folder = folder_name(step)
        self._place.delete([f"{folder}/{INDEX}"])
        self._place.delete(path for path in self._place.walk(folder) if _OURS.fullmatch(path))

    def free_bytes(self) -> int | None:
        return None

    def check_new(self) -> None:
        with self._tried("to list the files"):
            there = [name for name in self._place.names("") if step_of(name) is not None]
        if there:
            raise StorageError(
                "checkpoints already exist here, or another run is writing them",
                where=self.where,
                got=", ".join(there[:5]),
                hint="Resume the run that wrote them, or choose another place for a new run.",
            )
        self.check_writable()

    def check_writable(self) -> None:
        probe = f"probe-{secrets.token_hex(8)}"
        with self._tried(f"to write {probe}"):
            self._place.put(probe, b"\0")
        with self._tried(f"to remove {probe}"):
            self._place.delete([probe])

    @contextmanager
    def _tried(self, what: str) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise StorageError(
                "checkpoints cannot be stored here",
                where=self.where,
                expected=what,
                got=error.problem,
                hint="Check the URL, the credentials and their permissions to list, write, read and remove files.",
            ) from error


class UrlDraft:
    """A `Draft` at a URL."""

    def __init__(self, place: _Place, step: int, attempt: str, save: int) -> None:
        self._place = place
        self._final = folder_name(step)
        self._inner = f"{attempt}-{save:08}"
        self._folder = f"{self._final}/{self._inner}"
        self._perhaps_published = False

    @property
    def where(self) -> str:
        return f"{self._place.url}/{self._folder}"

    def begin(self) -> None:
        """Do nothing: object stores need no folders."""

    def name_of(self, shard: str) -> str:
        return f"{self._inner}/{shard}"

    @contextmanager
    def writing(self, shard: str, size: int) -> Iterator[Sink]:
        with self._place.writing(f"{self._folder}/{shard}", size) as sink:
            yield sink

    def drop(self, shard: str) -> None:
        self._place.delete([f"{self._folder}/{shard}"])

    def leave(self, mark: str, data: bytes) -> None:
        self._place.put(f"{self._folder}/{mark}", data)

    def marks(self) -> set[str]:
        return set(self._place.names(self._folder))

    def read(self, marks: Sequence[str]) -> list[bytes]:
        found = self._place.read_all([f"{self._folder}/{mark}" for mark in marks])
        for mark, data in zip(marks, found, strict=True):
            if data is None:
                raise FileNotFoundError(f"there is no {self.where}/{mark} anymore")
        return [data for data in found if data is not None]

    def complete(self, index: CheckpointIndex) -> None:
        """Check that all shards exist: another attempt of the run may have begun meanwhile, and removed them."""
        there = self._place.walk(self._folder)
        for file in index.files:
            size = there.get(f"{self._final}/{file.name}")
            if size != file.size:
                raise StorageError(
                    "a shard that was written is missing",
                    where=f"{self._place.url}/{self._final}/{file.name}",
                    expected=f"{file.size} bytes",
                    got="nothing" if size is None else f"{size} bytes",
                    hint="Check whether another process drives the same run, or something removes files there.",
                )

    def publish(self, index: CheckpointIndex) -> None:
        self._perhaps_published = True  # even if the request fails: its response may be lost or late
        self._place.put(f"{self._final}/{INDEX}", encode_index(index))

    def release(self) -> None:
        inside = {path for path in self._place.walk(self._final) if _OURS.fullmatch(path)}
        own = {path for path in inside if path.startswith(f"{self._folder}/")}
        self._place.delete(sorted(path for path in own if not path.endswith(_SHARD)))
        self._place.delete(sorted(inside - own - {f"{self._final}/{INDEX}"}))

    def give_up(self, shard: str, notice: bytes) -> None:
        kept = _SHARD if self._perhaps_published else _NOTICE
        with suppress(StorageError):  # without a notice the other ranks wait for their timeout
            self._place.put(f"{self._folder}/{_NOTICE}", notice)
            inside = self._place.walk(self._folder)
            self._place.delete(path for path in inside if not path.endswith((_NOTICE, kept)))

    def notice(self) -> bytes | None:
        return self._place.read(f"{self._folder}/{_NOTICE}")

    def pending(self, rank: int) -> bool:
        """Return True until rank 0 has removed the markers, which it does whether it publishes or gives up."""
        return self._place.size(f"{self._folder}/rank-{rank:05}{_DONE}") is not None

    def published(self, attempt: str) -> bool:
        return self._place.size(f"{self._final}/{INDEX}") is not None

    def withdraw(self, rank: int, shard: str) -> None:
        with suppress(StorageError):
            self._place.delete([f"{self._folder}/{shard}", f"{self._folder}/rank-{rank:05}{_DONE}"])

    def forget(self) -> None:
        if self._perhaps_published and self._is_published():
            self.release()
        else:
            self._place.delete(self._place.walk(self._folder))

    def _is_published(self) -> bool:
        path = f"{self._final}/{INDEX}"
        data = self._place.read(path)
        if data is None:
            return False
        return any(file.name.startswith(f"{self._inner}/") for file in decode_index(data, f"{self._place.url}/{path}").files)


class UrlFiles:
    """`CheckpointFiles` at a URL."""

    def __init__(self, url: str) -> None:
        self._place = _Place(url)

    @property
    def where(self) -> Path | str:
        return self._place.url

    def read(self, name: str) -> bytes:
        data = self._place.read(name)
        if data is None:
            raise FileNotFoundError(f"there is no {self._place.url}/{name}")
        return data

    def size(self, name: str) -> int:
        size = self._place.size(name)
        if size is None:
            raise FileNotFoundError(f"there is no {self._place.url}/{name}")
        return size

    @contextmanager
    def opened(self, name: str) -> Iterator[Ranges]:
        yield _UrlRanges(self._place, name)


class _UrlRanges:
    """`Ranges` of a file at a URL. Each range is one request."""

    def __init__(self, place: _Place, path: str) -> None:
        self._place, self._path = place, path

    def announce(self, start: int, stop: int) -> None:
        """Do nothing: there is no prefetch."""

    def fill(self, start: int, into: memoryview) -> None:
        data = self._place.part(self._path, start, start + len(into))
        into[: len(data)] = data


class _Bounded:
    """An upload with a timeout for each piece."""

    def __init__(self, upload: Upload, where: str) -> None:
        self._upload, self._where = upload, where

    def write(self, piece: bytes | memoryview, /) -> None:
        _answer(self._upload.write, piece, where=self._where)


def _answer(ask: Callable[..., T], *arguments: Any, where: str) -> T:
    """Return the result of a call with a timeout; it runs in a separate thread, since fsspec's libraries may block forever.

    Errors of the call are raised as they are.

    Raises:
        StorageError: it has not returned within `_ANSWER_SECONDS`; its thread is abandoned.
    """
    given: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            given.put((ask(*arguments), None))
        except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
            given.put((None, error))

    threading.Thread(target=call, name=f"asking {where}", daemon=True).start()
    try:
        found, error = given.get(timeout=_ANSWER_SECONDS)
    except queue.Empty:
        raise StorageError("the store does not respond", where=where, expected=f"a response within {_ANSWER_SECONDS:g} s") from None
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # None is one of its values then


def _at_once(ask: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    """Yield the result of a call for each path, in order; several calls run concurrently."""
    if len(paths) < 2:
        yield from map(ask, paths)
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(ask, paths)
