"""The folder of a run, which is removed if the launch that has made it fails before the run begins.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainload.core.errors import StorageError
from trainload.core.logs import logged_suppress
from trainload.core.reading import reading
from trainload.core.storage.open_files import open_bounded
from trainload.core.storage.places import Where, is_url, local_path
from trainload.launching.run.run_place import files_of, place_name
from trainload.packaging.stores.references import is_oci

_log = logging.getLogger(__name__)

RUN_FILE = "run.json"


def has_run(where: Where) -> bool:
    """Return True if there is a run at a path or URL.

    Raises:
        StorageError: the URL cannot be reached.
    """
    if is_url(where):
        is_plain = "#" not in str(where) and not is_oci(str(where))
        return is_plain and open_bounded(str(where)).size(RUN_FILE) is not None
    return (local_path(where) / RUN_FILE).is_file()


@dataclass(slots=True)
class RunFolder:
    """The folder of a run that is about to begin.

    Attributes:
        run_dir: the folder.
        is_created: True if this process has created the run.
        is_kept: True from the moment at which this or another process may drive the run.
    """

    run_dir: Path
    is_created: bool = False
    is_kept: bool = False


@contextmanager
def removed_unless_kept(run_dir: Path) -> Iterator[RunFolder]:
    """Yield the folder of a new run. If the run is not kept, what was created is removed on exit.

    The block sets `is_created` once it owns the folder: if two launches use one folder
    concurrently, the one that fails leaves the folder to the other. The decision reads nothing from
    the folder, whose storage may fail.

    Raises:
        StorageError: the folder cannot be read.
    """
    with reading("it", run_dir):
        new_folders = missing_folders(run_dir)
        entries = frozenset() if new_folders else frozenset(os.listdir(run_dir))
    folder = RunFolder(run_dir)
    try:
        yield folder
    finally:
        if folder.is_created and not folder.is_kept:
            with logged_suppress(_log, f"{run_dir} was not removed", OSError, StorageError):
                files = files_of(run_dir)
                _remove(run_dir, new_folders, entries)
                if files is not None:
                    files.delete(RUN_FILE)


def missing_folders(path: Path) -> list[Path]:
    """Return a folder and its parents, innermost first, as far as they do not exist."""
    return [each for each in (path, *path.parents) if not each.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, innermost first; those that have entries or do not exist are left."""
    for folder in folders:
        with suppress(OSError):  # another process uses it meanwhile
            folder.rmdir()


def resume_command(run_dir: str | Path) -> str:
    """Return the shell command that continues a run in a folder, a working copy, or at a URL."""
    place = place_name(run_dir) if isinstance(run_dir, Path) else run_dir
    return f"trainload resume {shlex.quote(place)}"


def _remove(run_dir: Path, new_folders: list[Path], entries: frozenset[str]) -> None:
    """Remove a folder with its new parents; one that existed keeps the entries that it had."""
    if new_folders:
        shutil.rmtree(run_dir)
        remove_empty(new_folders[1:])
        return
    for name in set(os.listdir(run_dir)) - entries:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
