"""The place of a run's checkpoints: a folder that all nodes share, or an fsspec URL.

    step-N/index.json                     what makes it a checkpoint
    step-N/<attempt>-<save>/rank-...      its shards, as the index names them; until it is published
                                          also marks, and the notice

All ranks write a shard each and then a mark. Rank 0 publishes the checkpoint by writing its index
last, in one piece: that needs no renaming of folders, which object stores lack. The name of a shard
is unique to its attempt and save. A file that no index names is garbage: retention removes an index
before its shards, and an attempt of the run removes what others have left.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from trainload.core.canonical_json import MAX_BYTES
from trainload.core.credentials import check_no_credentials
from trainload.core.errors import CheckpointError, StorageError, TrainloadError
from trainload.core.logs import logged_suppress
from trainload.core.storage.bounded_files import BoundedFiles
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import NO_OPTIONS, Sink, StoreFiles
from trainload.core.storage.places import Where, is_url
from trainload.core.storage.remote_files import RemoteFiles
from trainload.core.writable_folder import check_writable_folder
from trainload.launching.checkpoints.index import (
    CHECKPOINTS,
    INDEX,
    CheckpointIndex,
    decode_index,
    encode_index,
    folder_name,
    step_of,
)

_log = logging.getLogger(__name__)

_CONCURRENT_REQUESTS = 8
"""Number of concurrent requests to a URL."""
_NOTICE = "given-up"
_DONE = ".done"
_SHARD = ".safetensors"
_WRITTEN_PATH = re.compile(
    r"(?P<folder>step-[0-9]{8,})/"
    r"(?:index\.json|(?P<temporary>\.[^/]+)|rank-[^/]+\.safetensors|(?P<attempt>[A-Za-z0-9._-]+)-(?P<save>[0-9]{8})/[^/]+)"
)
"""Paths that runs write.

Nothing else is ever removed. Shards beside the index are those of older versions.
"""
_OLD_DRAFT = re.compile(r"\.tmp-(?:step|deleted|replaced|failed)-.+")
"""Paths that killed writers of older versions left in a folder."""

T = TypeVar("T")


def whole_place(where: Where) -> str:
    """Return a place in the form in which a run stores it: a URL, or an absolute path.

    Raises StorageError if it contains credentials.
    """
    check_no_credentials(str(where))
    if is_url(where):
        return str(where).rstrip("/")
    return str(Path(str(where).partition("://")[2] if "://" in str(where) else where).absolute())


def place_of(run_dir: Where, checkpoints: str | None = None) -> CheckpointPlace:
    """Return the place of a run's checkpoints.

    Args:
        run_dir: folder or URL of the run.
        checkpoints: a folder or fsspec URL; None for a subfolder of the run's.

    Raises:
        StorageError: the URL's protocol is unknown, or its library is not installed.
    """
    if checkpoints is None and is_url(run_dir):
        checkpoints = f"{run_dir}/{CHECKPOINTS}"
    if checkpoints is not None and is_url(checkpoints):
        return CheckpointPlace(BoundedFiles(RemoteFiles(checkpoints, NO_OPTIONS)), None)
    folder = Path(run_dir) / CHECKPOINTS if checkpoints is None else Path(checkpoints)
    return CheckpointPlace(FolderFiles(folder), folder)


class CheckpointPlace:
    """The place of a run's checkpoints. One run uses it at a time.

    Invariants: what is published is complete. A checkpoint stops being one before any of its files
    is removed. All methods raise OSError or StorageError if the storage fails.

    Args:
        files: its files.
        folder: path of the folder; None at a URL.
    """

    def __init__(self, files: StoreFiles, folder: Path | None) -> None:
        self._files, self._folder = files, folder

    @property
    def where(self) -> str:
        """Name of the place in messages."""
        return self._files.url

    @property
    def pauses(self) -> tuple[float, float]:
        """Seconds between two queries of a rank that waits: at first, and at most."""
        return (0.1, 2.0) if self._folder is None else (0.02, 0.02)

    def os_error(self, error: OSError | TrainloadError) -> OSError | TrainloadError:
        """Return the operating system's error behind an error of a folder; any other error
        unchanged.
        """
        cause = error.__cause__
        return (
            cause
            if self._folder is not None
            and isinstance(error, StorageError)
            and isinstance(cause, OSError)
            else error
        )

    def begin(self) -> None:
        """Create the place if necessary."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def tidy(self, attempt: str) -> None:
        """Remove the files of other attempts of the run that no checkpoint needs."""
        files: dict[str, list[re.Match[str]]] = defaultdict(list)
        old: list[str] = []
        for file in self._files.walk(""):
            if match := _WRITTEN_PATH.fullmatch(file.path):
                files[match["folder"]].append(match)
            elif _OLD_DRAFT.fullmatch(file.path):
                old.append(file.path)
        delete(self._files, old)
        for folder, matches in files.items():
            strange = {
                match[0]
                for match in matches
                if match["temporary"] or match["attempt"] not in (None, attempt)
            }
            if any(match[0] == f"{folder}/{INDEX}" for match in matches):
                strange -= self._files_to_keep(folder, strange)
            delete(self._files, sorted(strange))
        self._files.prune("")
        self.begin()

    def _files_to_keep(self, folder: str, paths: set[str]) -> set[str]:
        """Return those files in a checkpoint's folder that its index may name."""
        shards = {path for path in paths if path.endswith(_SHARD)}
        # published once: all shards are its own
        if len({path.split("/")[1] for path in paths}) <= 1:
            return shards
        try:
            return {f"{folder}/{file.name}" for file in self._read_index(folder).files}
        except CheckpointError:
            return shards  # the index cannot be read, so keep all of them

    def _read_index(self, folder: str) -> CheckpointIndex:
        path = f"{folder}/{INDEX}"
        return decode_index(self._files.read(path, MAX_BYTES) or b"", f"{self.where}/{path}")

    def published(self) -> Mapping[int, Where]:
        """Return step -> checkpoint, oldest first."""
        steps = {
            step: name for name in self._files.names("") if (step := step_of(name)) is not None
        }
        folders = [steps[step] for step in sorted(steps)]
        has_index = at_once(lambda folder: INDEX in self._files.names(folder), folders)
        return {
            step: self._checkpoint_at(steps[step])
            for step, whole in zip(sorted(steps), has_index, strict=True)
            if whole
        }

    def _checkpoint_at(self, name: str) -> Where:
        return f"{self.where}/{name}" if self._folder is None else self._folder / name

    def draft(self, step: int, attempt: str, save: int) -> Draft:
        """Begin to write a checkpoint.

        `save`: the number of this save of the attempt, the same on all ranks.
        """
        return Draft(self._files, step, attempt, save)

    def delete(self, step: int) -> None:
        """Delete a checkpoint."""
        folder = folder_name(step)
        self._files.delete(f"{folder}/{INDEX}")
        delete(
            self._files,
            [file.path for file in self._files.walk(folder) if _WRITTEN_PATH.fullmatch(file.path)],
        )
        self._files.prune(folder)

    def free_bytes(self) -> int | None:
        """Return how much can be written; None if that is unknown."""
        return self._files.free_bytes()

    def check_new(self) -> None:
        """Check that a new run may write here.

        Raises: StorageError: checkpoints exist, or none can be written.
        """
        with self._naming_operation("to list the files"):
            existing = [name for name in self._files.names("") if step_of(name) is not None]
        if existing:
            raise StorageError(
                "checkpoints already exist here, or another run is writing them",
                where=self.where,
                got=", ".join(existing[:5]),
                hint="Resume the run that wrote them, or choose another place for a new run.",
            )
        self.check_writable()

    def check_writable(self) -> None:
        """Write something and remove it again.

        Raises: StorageError, with what was tried and why it failed.
        """
        if self._folder is not None:
            hint = "Make the folder writable, or choose another place."
            check_writable_folder(
                self._folder, "the folder of the checkpoints cannot be written", hint
            )
            return
        probe = f"probe-{secrets.token_hex(8)}"
        with self._naming_operation(f"to write {probe}"):
            self._files.replace(probe, b"\0")
        with self._naming_operation(f"to remove {probe}"):
            self._files.delete(probe)

    @contextmanager
    def _naming_operation(self, what: str) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            raise StorageError(
                "checkpoints cannot be stored here",
                where=self.where,
                expected=what,
                got=error.problem,
                hint=(
                    "Check the URL, the credentials and their permissions to list, write, read and"
                    " remove files."
                ),
            ) from error


class Draft:
    """A checkpoint that is being written, as one rank sees it.

    Marks are small files by which the ranks tell each other their progress. The notice says that
    rank 0 gave up.

    Invariants: nothing of it is visible before `publish` has begun. What killed writers leave hides
    no published checkpoint, and is removed when the next attempt begins. All methods raise
    StorageError if the storage fails.
    """

    def __init__(self, files: StoreFiles, step: int, attempt: str, save: int) -> None:
        self._files = files
        self._final = folder_name(step)
        self._inner = f"{attempt}-{save:08}"
        self._folder = f"{self._final}/{self._inner}"
        self._perhaps_published = False

    @property
    def where(self) -> str:
        """Name of the draft in messages."""
        return f"{self._files.url}/{self._folder}"

    def name_of(self, shard: str) -> str:
        """Return the name of a shard in the index."""
        return f"{self._inner}/{shard}"

    @contextmanager
    def writing(self, shard: str, size: int) -> Iterator[Sink]:
        """Receive the `size` bytes of this rank's shard, which exists when the block has ended."""
        upload = self._files.upload(f"{self._folder}/{shard}", size)
        try:
            yield upload
            upload.finish()
        except BaseException:
            with logged_suppress(_log, "a failed upload was not removed", StorageError):
                upload.abandon()
            raise

    def drop(self, shard: str) -> None:
        """Remove this rank's shard."""
        self._files.delete(f"{self._folder}/{shard}")

    def leave(self, mark: str, data: bytes) -> None:
        """Write a mark."""
        self._files.replace(f"{self._folder}/{mark}", data)

    def marks(self) -> set[str]:
        """Return the names of the marks that exist."""
        return set(self._files.names(self._folder))

    def read(self, marks: Sequence[str]) -> list[bytes]:
        """Return the content of marks that exist."""
        contents = list(
            at_once(lambda mark: self._files.read(f"{self._folder}/{mark}", MAX_BYTES), list(marks))
        )
        for mark, data in zip(marks, contents, strict=True):
            if data is None:
                raise FileNotFoundError(f"there is no {self.where}/{mark} anymore")
        return [data for data in contents if data is not None]

    def complete(self, index: CheckpointIndex) -> None:
        """Check that all shards exist: another attempt of the run may have begun meanwhile, and
        removed them.
        """
        sizes = {file.path: file.size for file in self._files.walk(self._folder)}
        for file in index.files:
            size = sizes.get(f"{self._final}/{file.name}")
            if size != file.size:
                raise StorageError(
                    "a shard that was written is missing",
                    where=f"{self._files.url}/{self._final}/{file.name}",
                    expected=f"{file.size} bytes",
                    got="nothing" if size is None else f"{size} bytes",
                    hint=(
                        "Check whether another process drives the same run, or something removes"
                        " files there."
                    ),
                )

    def publish(self, index: CheckpointIndex) -> None:
        """Rank 0: make the checkpoint visible.

        One of the same step is replaced: the run was set back, and has reached the step again.
        """
        # even if the request fails: its response may be lost or late
        self._perhaps_published = True
        self._files.replace(f"{self._final}/{INDEX}", encode_index(index))

    def release(self) -> None:
        """Rank 0: it is published. Let the other ranks know, and remove the replaced one."""
        inside = {
            file.path
            for file in self._files.walk(self._final)
            if _WRITTEN_PATH.fullmatch(file.path)
        }
        own = {path for path in inside if path.startswith(f"{self._folder}/")}
        delete(self._files, sorted(path for path in own if not path.endswith(_SHARD)))
        delete(self._files, sorted(inside - own - {f"{self._final}/{INDEX}"}))

    def give_up(self, shard: str, notice: bytes) -> None:
        """Rank 0: leave the notice, and remove the rest. It raises nothing."""
        kept_suffix = _SHARD if self._perhaps_published else _NOTICE
        leftovers = "files of a failed checkpoint were not removed"
        with logged_suppress(_log, leftovers, StorageError):
            if not self._perhaps_published:
                self.drop(shard)  # room for the notice on a full disk
        unheard = "other ranks do not learn that a checkpoint failed, and wait for their timeout"
        with logged_suppress(_log, unheard, StorageError):
            self._files.replace(f"{self._folder}/{_NOTICE}", notice)
        with logged_suppress(_log, leftovers, StorageError):
            inside = [file.path for file in self._files.walk(self._folder)]
            delete(
                self._files, [path for path in inside if not path.endswith((_NOTICE, kept_suffix))]
            )

    def notice(self) -> bytes | None:
        """Return the notice, if rank 0 gave up."""
        return self._files.read(f"{self._folder}/{_NOTICE}", MAX_BYTES)

    def pending(self, rank: int) -> bool:
        """Return True until rank 0 has removed the marks, which it does whether it publishes or
        gives up.
        """
        return self._files.size(f"{self._folder}/rank-{rank:05}{_DONE}") is not None

    def published(self) -> bool:
        """Return True if the checkpoint is visible."""
        return self._files.size(f"{self._final}/{INDEX}") is not None

    def withdraw(self, rank: int, shard: str) -> None:
        """Remove the part of a rank that has read the notice. It raises nothing."""
        with logged_suppress(_log, "files of a failed checkpoint were not removed", StorageError):
            delete(
                self._files, [f"{self._folder}/{shard}", f"{self._folder}/rank-{rank:05}{_DONE}"]
            )

    def forget(self) -> None:
        """Rank 0, after it gave up and all ranks have continued: remove the notice and what came
        after it.
        """
        if self._perhaps_published and self._is_published():
            self.release()
        else:
            delete(self._files, [file.path for file in self._files.walk(self._folder)])
            self._files.prune(self._final)

    def _is_published(self) -> bool:
        path = f"{self._final}/{INDEX}"
        data = self._files.read(path, MAX_BYTES)
        if data is None:
            return False
        return any(
            file.name.startswith(f"{self._inner}/")
            for file in decode_index(data, f"{self._files.url}/{path}").files
        )


def delete(files: StoreFiles, paths: Iterable[str]) -> None:
    """Remove files, if they exist."""
    for _ in at_once(files.delete, list(paths)):
        pass


def at_once(ask: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    """Call a function for each path, some concurrently; yield the results in order."""
    if len(paths) < 2:
        yield from map(ask, paths)
        return
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        yield from pool.map(ask, paths)
