"""Where a run's checkpoints lie: a folder that all nodes share, or an fsspec URL. Who writes or reads them knows no more of it."""

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
    """A checkpoint that is being written, as one rank has it.

    Marks are small files, there whole or not at all, by which the ranks tell each other how far they are. The notice is rank 0's word that
    it gave up.

    Laws: nothing of it is seen before `publish` has begun. What is left of one whose writers were killed hides nothing that was published,
    and is removed when the next attempt begins.

    All of them raise OSError or StorageError where the place fails.
    """

    @property
    def where(self) -> str:
        """What it is called in messages."""

    def begin(self) -> None:
        """Before this rank writes."""

    def name_of(self, shard: str) -> str:
        """How the index names a shard."""

    def writing(self, shard: str, size: int) -> AbstractContextManager[Sink]:
        """Takes the bytes of this rank's shard, of which there are `size`; it is there for good when the block has ended."""

    def drop(self, shard: str) -> None:
        """Removes this rank's shard."""

    def leave(self, mark: str, data: bytes) -> None:
        """Makes a mark."""

    def marks(self) -> set[str]:
        """The names of those that there are."""

    def read(self, marks: Sequence[str]) -> list[bytes]:
        """Those of these names, which are there."""

    def complete(self, index: CheckpointIndex) -> None:
        """Rank 0: all shards are there. Does what can be done before anybody sees them."""

    def publish(self, index: CheckpointIndex) -> None:
        """Rank 0: makes it visible, whole. One of the same step gives way: the run has gone back behind it, and reached it again."""

    def release(self) -> None:
        """Rank 0: it is published. Lets the other ranks know, and removes the one that gave way."""

    def give_up(self, shard: str, notice: bytes) -> None:
        """Rank 0: leaves the notice, and removes what there is of the rest. Raises nothing."""

    def notice(self) -> bytes | None:
        """What rank 0 says, if it gave up."""

    def pending(self, rank: int) -> bool:
        """Whether rank 0 has neither published nor given up; `rank` has left its mark."""

    def published(self, attempt: str) -> bool:
        """Whether it is visible, or another one that the same attempt has written for this step."""

    def withdraw(self, rank: int, shard: str) -> None:
        """A rank that has heard that rank 0 gave up removes its part. Raises nothing."""

    def forget(self) -> None:
        """Rank 0, which gave up on it: no rank asks any more. Removes the notice, and what came after it."""


class CheckpointPlace(Protocol):
    """The place of a run's checkpoints. One run uses it at a time.

    Laws: what is published is whole. A checkpoint stops being one before any of its files is removed.

    All of them raise OSError or StorageError where the place fails.
    """

    @property
    def where(self) -> str:
        """What it is called in messages."""

    @property
    def pauses(self) -> tuple[float, float]:
        """Seconds between two questions of one who waits: the first ones, and at most."""

    def begin(self) -> None:
        """Makes it, where that must be done."""

    def tidy(self, attempt: str) -> None:
        """Removes what others than this attempt of the run have left that no checkpoint needs."""

    def published(self) -> Mapping[int, Where]:
        """Step -> checkpoint, oldest first."""

    def draft(self, step: int, attempt: str, save: int) -> Draft:
        """A checkpoint that begins to be written. `save`: the number of this attempt to write one, the same on all ranks."""

    def delete(self, step: int, attempt: str) -> None:
        """Deletes a checkpoint."""

    def free_bytes(self) -> int | None:
        """How much it takes; None where that cannot be known."""

    def check_new(self) -> None:
        """Check that a new run may write here. Raises: StorageError: checkpoints exist, or none can be written."""

    def check_writable(self) -> None:
        """Writes something and removes it again. Raises: StorageError, with what was tried and why it failed."""


class CheckpointFiles(Protocol):
    """The files of a published checkpoint.

    All of them raise OSError or StorageError where the place fails; FileNotFoundError where there is no such file.
    """

    @property
    def where(self) -> Where:
        """The checkpoint."""

    def read(self, name: str) -> bytes:
        """A file's bytes."""

    def size(self, name: str) -> int:
        """A file's bytes, counted."""

    def opened(self, name: str) -> AbstractContextManager[Ranges]:
        """A file, for reading parts of it."""


def is_url(where: Where) -> bool:
    """Whether this is an fsspec URL, and not the path of a folder of this machine's."""
    return isinstance(where, str) and "://" in where and not where.startswith(("file://", "local://"))


def whole_place(where: Where) -> str:
    """A place as a run keeps it: a URL, or an absolute path. Raises: StorageError, where it holds credentials."""
    check_no_credentials(str(where))
    if is_url(where):
        return str(where).rstrip("/")
    return str(Path(str(where).partition("://")[2] if "://" in str(where) else where).absolute())


def place_of(run_dir: Path, checkpoints: str | None = None) -> CheckpointPlace:
    """Where a run's checkpoints lie.

    Args:
        run_dir: its folder.
        checkpoints: a folder or fsspec URL; None: a folder of its folder.

    Raises:
        StorageError: no such kind of URL is known, or the library for it is not installed.
    """
    if checkpoints is not None and is_url(checkpoints):
        from trainload.launching.checkpoints.url_place import UrlPlace

        return UrlPlace(checkpoints)
    from trainload.launching.checkpoints.folder_place import FolderPlace

    return FolderPlace(run_dir / CHECKPOINTS if checkpoints is None else Path(checkpoints))


def files_at(where: Where) -> CheckpointFiles:
    """The files of a checkpoint. Raises: as `place_of`."""
    if is_url(where):
        from trainload.launching.checkpoints.url_place import UrlFiles

        return UrlFiles(str(where))
    from trainload.launching.checkpoints.folder_place import FolderFiles

    return FolderFiles(Path(where))
