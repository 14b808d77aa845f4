"""Files of a package: read with checks against the manifest, and written atomically."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainload.core.atomic import sync_file, sync_folder, temporary_folder
from trainload.core.canonical_json import MAX_BYTES, sha256_bytes
from trainload.core.errors import IntegrityError, StorageError, UnsafePackageError
from trainload.core.paths import check_name, is_full, open_inside
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_paths import MANIFEST, OUTSIDE


def read_checked(root: Path, path: str, entry: FileEntry) -> bytes:
    """Return a file's bytes after checking their size and digest against the manifest.

    Raises:
        IntegrityError: the size or the digest differs.
        UnsafePackageError: it is a link, or too large to be read at once.
    """
    if entry.size > MAX_BYTES:
        raise UnsafePackageError(
            "a file is too large",
            where=path,
            expected=f"at most {MAX_BYTES} bytes",
            got=str(entry.size),
        )
    with open_inside(root, path) as file:
        data = file.read(entry.size + 1)
    _check_listed(path, entry, len(data), sha256_bytes(data))
    return data


def _check_listed(path: str, entry: FileEntry, size: int, digest: str) -> None:
    if (size, digest) != (entry.size, entry.sha256):
        raise IntegrityError(
            "a file does not match its entry in the manifest",
            where=path,
            expected=f"{entry.size} bytes of sha256 {entry.sha256}",
            got=f"{'more' if size > entry.size else size} bytes of sha256 {digest}",
            hint="Fetch the package again.",
        )


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path relative to `root`, status) of every file under `root`, in sorted order.

    Files that vanish meanwhile are skipped: another process may be replacing a derived graph.

    Raises:
        UnsafePackageError: there is a link or a special file.
    """

    def visit(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            path = prefix + entry.name
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from visit(Path(entry.path), path + "/")
            elif stat.S_ISREG(status.st_mode):
                yield path, status
            else:
                raise UnsafePackageError(
                    "a package may contain only regular files and folders",
                    where=path,
                    got="a link or a special file",
                )

    yield from visit(root, "")


def check_outside_packages(path: Path) -> None:
    """Raise StorageError if `path` is inside a package, which an unlisted file would make
    invalid.
    """
    absolute = path.absolute()
    for parent in absolute.parents:
        if (
            (parent / MANIFEST).is_file()
            and (parent / "graphs").is_dir()
            and absolute.relative_to(parent).parts[0] not in OUTSIDE
        ):
            raise StorageError(
                "this path is inside a package, which could then no longer be opened",
                where=str(path),
                expected=f"a path outside {parent}",
                hint="Choose another path.",
            )


def check_new_folder(path: Path) -> None:
    """Check that a folder can be written at `path`, before any work is done.

    Raises:
        StorageError: it exists, or is in no folder.
    """
    if path.exists():
        raise StorageError(
            "it exists already", where=str(path), hint="Choose another path, or remove it."
        )
    if not path.absolute().parent.is_dir():
        raise StorageError(
            "there is no such folder", where=str(path.absolute().parent), hint="Create it first."
        )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Create a folder atomically: it appears, complete, when the block ends without an error.

    Yields:
        A hidden sibling to write into.

    Raises:
        StorageError: `path` is taken, its parent is missing or not writable, or the disk is full;
            nothing is left behind.
    """
    with _draft_folder(Path(path)) as folder:
        yield folder
        folder.chmod(0o755)
        for inner, _, _ in os.walk(folder):
            sync_folder(Path(inner))
        _move_into_place(folder, Path(path))


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Create a file atomically: it appears, complete, when the block ends without an error.

    Yields:
        A path of the same name in a hidden sibling folder. Anything else that the block leaves in
        that folder is removed.

    Raises:
        StorageError: `path` is taken, its parent is missing or not writable, or the disk is full;
            nothing is left behind.
    """
    path = Path(path)
    with _draft_folder(path) as folder:
        yield folder / path.name
        sync_file(folder / path.name)
        _move_into_place(folder / path.name, path)


@contextmanager
def _draft_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder beside a free path.

    Its remaining contents are removed when the block ends.
    """
    check_name(path)
    check_outside_packages(path)
    if os.path.lexists(path):
        raise StorageError(
            "the path already exists", where=str(path), hint="Choose another path, or remove it."
        )
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder(path))
        except OSError as error:
            raise StorageError(
                f"the folder cannot be written: {error.strerror}", where=str(path.parent)
            ) from error
        try:
            yield folder
        except OSError as error:
            if is_full(error):
                raise StorageError(
                    "the disk is full",
                    where=str(path),
                    hint="Free some space, or choose another disk.",
                ) from error
            raise StorageError(
                f"writing failed: {error.strerror or error}", where=str(path)
            ) from error


def _move_into_place(finished: Path, path: Path) -> None:
    """Move a finished file or folder to its path and sync the parent folder to disk."""
    if os.path.lexists(path):
        raise StorageError(
            "another process has created this path meanwhile",
            where=str(path),
            hint="Choose another path, or remove it.",
        )
    finished.rename(path)
    sync_folder(path.parent)


def copy_checked(root: Path, path: str, entry: FileEntry, target: Path) -> None:
    """Copy a package's file of any size to a new path and sync it to disk.

    Raises:
        IntegrityError: the bytes are not those that the manifest lists; `target` then contains a
            part of them.
        OSError: `target` exists, or the disk is full.
    """
    digest, size = hashlib.sha256(), 0
    with open_inside(root, path) as read, target.open("xb") as write:
        while size <= entry.size and (block := read.read(2**20)):
            digest.update(block)
            size += len(block)
            write.write(block)
        write.flush()
        os.fsync(write.fileno())
    _check_listed(path, entry, size, digest.hexdigest())
