"""Checkpoints in a folder on shared storage: written to a draft folder, synced to disk, published by an atomic rename.

Every rank writes a shard and then a marker file into `.tmp-step-N-<attempt>/`. Rank 0 writes the index and
renames the folder to `step-N`. If it gives up, it leaves a notice for ranks that still wait or arrive late.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from trainload.core.atomic import replace_file, sync_folder
from trainload.core.errors import StorageError
from trainload.core.writable_folder import check_writable_folder, existing_folder
from trainload.launching.checkpoints.index import DRAFT, INDEX, CheckpointIndex, checkpoints_in, decode_index, encode_index, folder_name
from trainload.packaging.tensors.chunks import Ranges, ranges_of

_CURE = "Make the folder writable, or choose another place."


class FolderPlace:
    """A `CheckpointPlace` that is a folder."""

    pauses = (0.02, 0.02)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        return str(self._folder)

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def tidy(self, attempt: str) -> None:
        own = re.compile(re.escape(DRAFT) + r"step-[0-9]+-" + re.escape(attempt))
        for path in self._folder.iterdir():
            if path.is_dir() and path.name.startswith(DRAFT) and not own.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f"{DRAFT}failed-"):
                path.unlink()

    def published(self) -> Mapping[int, Path]:
        return checkpoints_in(self._folder)

    def draft(self, step: int, attempt: str, save: int) -> FolderDraft:
        return FolderDraft(self._folder, step, attempt, save)

    def delete(self, step: int, attempt: str) -> None:
        doomed = self._folder / f"{DRAFT}deleted-{folder_name(step)}-{attempt}"
        (self._folder / folder_name(step)).rename(doomed)
        shutil.rmtree(doomed)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(existing_folder(self._folder)).free

    def check_new(self) -> None:
        there = self.published()
        if there:
            raise StorageError(
                "checkpoints already exist here",
                where=self.where,
                got=f"step {', '.join(map(str, there))}",
                hint="Resume the run that wrote them, or choose another place for a new run.",
            )
        self.check_writable()

    def check_writable(self) -> None:
        check_writable_folder(self._folder, "the folder of the checkpoints cannot be written", _CURE)


class FolderDraft:
    """A `Draft` in a folder."""

    def __init__(self, folder: Path, step: int, attempt: str, save: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._draft = folder / f"{DRAFT}{folder_name(step)}-{attempt}"
        self._final = folder / folder_name(step)
        self._notice = folder / f"{DRAFT}failed-{save:08}-{attempt}"

    @property
    def where(self) -> str:
        return str(self._draft)

    def begin(self) -> None:
        self._draft.mkdir(exist_ok=True)

    def name_of(self, shard: str) -> str:
        return shard

    @contextmanager
    def writing(self, shard: str, size: int) -> Iterator[BinaryIO]:
        with (self._draft / shard).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def drop(self, shard: str) -> None:
        (self._draft / shard).unlink(missing_ok=True)

    def leave(self, mark: str, data: bytes) -> None:
        replace_file(self._draft / mark, data, durable=False)

    def marks(self) -> set[str]:
        return set(os.listdir(self._draft))

    def read(self, marks: Sequence[str]) -> list[bytes]:
        return [(self._draft / mark).read_bytes() for mark in marks]

    def complete(self, index: CheckpointIndex) -> None:
        for path in self._draft.glob("*.done"):
            path.unlink()
        replace_file(self._draft / INDEX, encode_index(index))
        sync_folder(self._draft)

    def publish(self, index: CheckpointIndex) -> None:
        if self._final.exists():
            self._final.rename(self._replaced)
        self._draft.rename(self._final)
        sync_folder(self._folder)

    @property
    def _replaced(self) -> Path:
        return self._folder / f"{DRAFT}replaced-{self._final.name}-{self._attempt}"

    def release(self) -> None:
        """Remove the replaced checkpoint. The other ranks notice the publication because the draft folder is gone."""
        shutil.rmtree(self._replaced, ignore_errors=True)

    def give_up(self, shard: str, notice: bytes) -> None:
        with contextlib.suppress(OSError):  # without a notice the other ranks wait for their timeout
            self.drop(shard)  # makes room for the notice on a full disk
            replace_file(self._notice, notice, durable=False)
        shutil.rmtree(self._draft, ignore_errors=True)

    def notice(self) -> bytes | None:
        return self._notice.read_bytes() if self._notice.is_file() else None

    def pending(self, rank: int) -> bool:
        return self._draft.exists() and not self._notice.is_file()

    def published(self, attempt: str) -> bool:
        index = self._final / INDEX
        return index.is_file() and decode_index(index.read_bytes(), str(index)).attempt == attempt

    def withdraw(self, rank: int, shard: str) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)  # this rank may have created it again after rank 0 removed it

    def forget(self) -> None:
        self._notice.unlink(missing_ok=True)


class FolderFiles:
    """`CheckpointFiles` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> Path:
        return self._folder

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def opened(self, name: str) -> AbstractContextManager[Ranges]:
        return ranges_of((self._folder / name).open("rb", buffering=0))
