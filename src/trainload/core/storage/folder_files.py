"""A store in a folder. Files are synced to disk, and then appear by rename or link."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from trainload.core.atomic import (
    NO_LINKS,
    create_file,
    publish,
    replace_file,
    replacing,
    sync_folder,
    temporary_beside,
    temporary_file,
)
from trainload.core.errors import IntegrityError, StorageError, UnsafePackageError
from trainload.core.paths import is_full, open_inside
from trainload.core.storage.interface import BLOCK, Expected, OnBytes, StoredFile
from trainload.core.writable_folder import existing_folder


class FolderFiles:
    """`StoreFiles` of a folder.

    Links in it are not followed. `shown` is its name in messages; None: its path.
    """

    def __init__(self, root: Path, shown: str | None = None) -> None:
        self._root = root.absolute()
        self._shown = shown or str(self._root)

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root

    @property
    def url(self) -> str:
        """The folder's name in messages."""
        return self._shown

    @cached_property
    def exclusive(self) -> bool:
        """True if the file system has hard links, whose creation is atomic and exclusive."""
        with self._writing("."), temporary_file(self._prepare_target("probe"), b"") as draft:
            other = temporary_beside(self._root / "probe")
            try:
                os.link(draft, other)
            except OSError as error:
                if error.errno in NO_LINKS:
                    return False
                raise
            other.unlink()
            return True

    def read(self, path: str, limit: int) -> bytes | None:
        """Return a file's bytes; see `StoreFiles.read`."""
        if self.size(path) is None:
            return None
        with self._reading(path), open_inside(self._root, path) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise UnsafePackageError(
                "a file of the store is too large",
                where=f"{self.url}/{path}",
                expected=f"at most {limit} bytes",
            )
        return data

    def size(self, path: str) -> int | None:
        """Return a file's size; see `StoreFiles.size`."""
        with self._reading(path):
            try:
                return (self._root / path).lstat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def version(self, path: str) -> None:
        """Return None: copies of a file on other machines have other times; see
        `StoreFiles.version`.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; see `StoreFiles.names`."""
        with self._reading(folder):
            try:
                return sorted(
                    name for name in os.listdir(self._root / folder) if not name.startswith(".")
                )
            except (FileNotFoundError, NotADirectoryError):
                return []

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """Yield all files below a folder; see `StoreFiles.walk`."""
        for inner, _, files in os.walk(self._root / folder):
            for name in sorted(files):
                path = Path(inner) / name
                with suppress(FileNotFoundError):  # another writer may have renamed it just now
                    status = path.lstat()
                    yield StoredFile(
                        path.relative_to(self._root).as_posix(), status.st_size, status.st_mtime
                    )

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists; see `StoreFiles.create`."""
        with self._writing(path):
            target = self._prepare_target(path)
            created = create_file(target, data)
            sync_folder(target.parent)
            return created

    def replace(self, path: str, data: bytes) -> None:
        """Write or replace a file; see `StoreFiles.replace`."""
        with self._writing(path):
            target = self._prepare_target(path)
            replace_file(target, data)
            sync_folder(target.parent)

    def delete(self, path: str) -> None:
        """Remove a file; see `StoreFiles.delete`."""
        with self._writing(path):
            (self._root / path).unlink(missing_ok=True)

    def send(self, path: str, source: Path, expected: Expected, on_bytes: OnBytes) -> None:
        """Write a file from a local one; see `StoreFiles.send`.

        It is read only once, so that exactly the checked bytes are written.
        """
        digest, size = hashlib.sha256(), 0
        with (
            self._writing(path),
            replacing(target := self._prepare_target(path)) as draft,
            open_inside(source.parent, source.name) as read,
        ):
            with draft.open("xb") as write:
                while block := read.read(BLOCK):
                    digest.update(block)
                    size += len(block)
                    write.write(block)
                    on_bytes(len(block))
            if size != expected.size or digest.hexdigest() != expected.sha256:
                on_bytes(-size)
                raise changed_file(source, expected, size, digest.hexdigest())
        with self._writing(path):
            sync_folder(target.parent)

    def receive(self, path: str, size: int) -> Iterator[bytes]:
        """Yield a file's bytes; see `StoreFiles.receive`."""
        with self._reading(path), open_inside(self._root, path) as file:
            while size > 0 and (block := file.read(min(BLOCK, size))):
                size -= len(block)
                yield block

    def part(self, path: str, start: int, stop: int) -> bytes:
        """See `StoreFiles.part`."""
        with self._reading(path), open_inside(self._root, path) as file:
            file.seek(start)
            return file.read(stop - start)

    def upload(self, path: str, size: int) -> FolderUpload:
        """See `StoreFiles.upload`."""
        with self._writing(path):
            return FolderUpload(self, path, self._prepare_target(path))

    def free_bytes(self) -> int | None:
        """See `StoreFiles.free_bytes`."""
        with self._reading("."):
            return shutil.disk_usage(existing_folder(self._root)).free

    def prune(self, folder: str) -> None:
        """See `StoreFiles.prune`."""
        for inner, _, _ in os.walk(self._root / folder, topdown=False):
            # without the root, a process that creates it at the same moment would fail
            if Path(inner) != self._root:
                with suppress(OSError):  # it has files
                    Path(inner).rmdir()

    def _prepare_target(self, path: str) -> Path:
        """Return the path at which to write a file, after creating its folder."""
        target = self._root / path
        self._make_folders(target.parent)
        return target

    def _make_folders(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if folder != self._root:
            self._make_folders(folder.parent)
        elif not folder.parent.is_dir():
            raise StorageError(
                "there is no such folder", where=str(folder.parent), hint="Create it first."
            )
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the store cannot be read: {error.strerror or error}", where=f"{self.url}/{path}"
            ) from error

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_full(error):
                raise StorageError(
                    "the disk is full",
                    where=self.url,
                    hint="Free some space; then repeat the command.",
                ) from error
            raise StorageError(
                f"the store cannot be written: {error.strerror or error}",
                where=f"{self.url}/{path}",
            ) from error


class FolderUpload:
    """See `Upload`: a temporary file beside the path that it takes at the end."""

    def __init__(self, files: FolderFiles, path: str, target: Path) -> None:
        self._files, self._path, self._target = files, path, target
        self._draft = temporary_beside(target)
        self._file = self._draft.open("xb")

    def write(self, piece: bytes | memoryview, /) -> None:
        """See `Upload.write`."""
        with self._files._writing(self._path):
            self._file.write(piece)

    def finish(self) -> None:
        """See `Upload.finish`."""
        with self._files._writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            publish(self._draft, self._target)
            sync_folder(self._target.parent)

    def abandon(self) -> None:
        """See `Upload.abandon`."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._draft.unlink(missing_ok=True)


def changed_file(source: Path, expected: Expected, size: int, digest: str) -> IntegrityError:
    """Return the error for a local file that is not the one that the manifest lists."""
    return IntegrityError(
        "a file does not match its entry in the manifest",
        where=str(source),
        expected=f"{expected.size} bytes of sha256 {expected.sha256}",
        got=f"{size} bytes of sha256 {digest}",
        hint="Run `trainload verify` to find all problems of the package.",
    )
