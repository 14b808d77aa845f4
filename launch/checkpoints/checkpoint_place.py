"""Interface of checkpoint storage: a folder on shared storage, or an fsspec URL. Writers and readers use only this interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeAlias

from trainload.core.credentials import check_no_credentials
from trainload.core.storage.interface import Sink
from trainload.launching.checkpoints.index import CHECKPOINTS, CheckpointIndex
from trainload.packaging.tensors.chunks import Ranges

Where: TypeAlias = Path | str
"""A checkpoint: its folder, or its URL."""


class Draft(Protocol):
    """A checkpoint that is being written, as one rank uses it.

    Marks are small files, written atomically, by which the ranks report their progress to each other. The
    notice is a file by which rank 0 reports that it gave up.

    Laws: nothing is visible before `publish` has begun. The leftovers of killed writers hide no published
    checkpoint, and are removed when the next attempt begins.

    All methods raise OSError or StorageError if the storage fails, unless stated otherwise.
    """

    @property
    def where(self) -> str:
        """Name of the draft in messages."""

    def begin(self) -> None:
        """Prepare the draft before this rank writes."""

    def name_of(self, shard: str) -> str:
        """Return the name of a shard in the index."""

    def writing(self, shard: str, size: int) -> AbstractContextManager[Sink]:
        """Return a context with a sink for the `size` bytes of this rank's shard, which is durable when the context ends."""

    def drop(self, shard: str) -> None:
        """Remove this rank's shard."""

    def leave(self, mark: str, data: bytes) -> None:
        """Write a mark."""

    def marks(self) -> set[str]:
        """Return the names of the existing marks."""

    def read(self, marks: Sequence[str]) -> list[bytes]:
        """Return the contents of these marks, which must exist."""

    def complete(self, index: CheckpointIndex) -> None:
        """Do what can be done before publication, once all shards exist. Rank 0 only."""

    def publish(self, index: CheckpointIndex) -> None:
        """Make the checkpoint visible atomically. Rank 0 only.

        An existing checkpoint of the same step, which the run has reached a second time, is replaced.
        """

    def release(self) -> None:
        """Tell the other ranks that it is published, and remove a replaced checkpoint. Rank 0 only."""

    def give_up(self, shard: str, notice: bytes) -> None:
        """Write the notice, and remove the rest of the draft. Raises nothing. Rank 0 only."""

    def notice(self) -> bytes | None:
        """Return the notice; None if rank 0 has not given up."""

    def pending(self, rank: int) -> bool:
        """Return True if rank 0 has neither published nor given up. `rank` must have left its mark."""

    def published(self, attempt: str) -> bool:
        """Return True if it, or another checkpoint of the same attempt for this step, is visible."""

    def withdraw(self, rank: int, shard: str) -> None:
        """Remove a rank's part of the draft after rank 0 gave up. Raises nothing."""

    def forget(self) -> None:
        """Remove the notice and late files of a draft that was given up, once no rank waits for it. Rank 0 only."""


class CheckpointPlace(Protocol):
    """Storage of a run's checkpoints, used by one run at a time.

    Laws: published checkpoints are complete. A checkpoint becomes invisible before any of its files is
    removed.

    All methods raise OSError or StorageError if the storage fails.
    """

    @property
    def where(self) -> str:
        """Name of the place in messages."""

    @property
    def pauses(self) -> tuple[float, float]:
        """Seconds between two polls of a waiting rank: initially, and at most."""

    def begin(self) -> None:
        """Create the place if necessary."""

    def tidy(self, attempt: str) -> None:
        """Remove files of other attempts of the run that no checkpoint needs."""

    def published(self) -> Mapping[int, Where]:
        """Return step -> checkpoint, oldest first."""

    def draft(self, step: int, attempt: str, save: int) -> Draft:
        """Return a new draft. `save` is the number of the save within the attempt, the same on all ranks."""

    def delete(self, step: int, attempt: str) -> None:
        """Delete a checkpoint."""

    def free_bytes(self) -> int | None:
        """Return the free space; None if it is unknown."""

    def check_new(self) -> None:
        """Raise StorageError if checkpoints exist here already, or the place is not writable."""

    def check_writable(self) -> None:
        """Write and remove a probe file; raise StorageError, with the failed operation, if that fails."""


class CheckpointFiles(Protocol):
    """Files of a published checkpoint.

    All methods raise OSError or StorageError if the storage fails, and FileNotFoundError if a file does
    not exist.
    """

    @property
    def where(self) -> Where:
        """The checkpoint."""

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""

    def opened(self, name: str) -> AbstractContextManager[Ranges]:
        """Return a context in which parts of a file can be read."""


def is_url(where: Where) -> bool:
    """Return True for an fsspec URL, and False for the path of a folder on this machine."""
    return isinstance(where, str) and "://" in where and not where.startswith(("file://", "local://"))


def whole_place(where: Where) -> str:
    """Return a place as a URL or an absolute path. Raises StorageError if it contains credentials."""
    check_no_credentials(str(where))
    if is_url(where):
        return str(where).rstrip("/")
    return str(Path(str(where).partition("://")[2] if "://" in str(where) else where).absolute())


def place_of(run_dir: Path, checkpoints: str | None = None) -> CheckpointPlace:
    """Return the storage of a run's checkpoints.

    Args:
        run_dir: the run's folder.
        checkpoints: a folder or fsspec URL; None for a subfolder of the run's folder.

    Raises:
        StorageError: the URL's protocol is unknown, or its library is not installed.
    """
    if checkpoints is not None and is_url(checkpoints):
        from trainload.launching.checkpoints.url_place import UrlPlace

        return UrlPlace(checkpoints)
    from trainload.launching.checkpoints.folder_place import FolderPlace

    return FolderPlace(run_dir / CHECKPOINTS if checkpoints is None else Path(checkpoints))


def files_at(where: Where) -> CheckpointFiles:
    """Return the files of a checkpoint. The errors are those of `place_of`."""
    if is_url(where):
        from trainload.launching.checkpoints.url_place import UrlFiles

        return UrlFiles(str(where))
    from trainload.launching.checkpoints.folder_place import FolderFiles

    return FolderFiles(Path(where))
