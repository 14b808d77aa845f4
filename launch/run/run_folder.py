"""The folder of a run, which is removed if the launch that has made it fails before the run begins.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainload.core.logs import logged_suppress
from trainload.launching.run.journal import JOURNAL
from trainload.launching.run.run_state import STATE_FILE

_log = logging.getLogger(__name__)

RUN_FILE = "run.json"
DRIVER_FOLDER = "driver"
"""Folder with the leases of the run's drivers."""


@dataclass(slots=True)
class NewFolder:
    """The folder of a run before the run has begun.

    Attributes:
        run_dir: the folder.
        made: True if this process has created the run.
        handed: True if another process has been asked to drive the run, and may do so.
    """

    run_dir: Path
    made: bool = False
    handed: bool = False


@contextmanager
def nothing_left(run_dir: Path) -> Iterator[NewFolder]:
    """Remove a run on exit, with its folder and the parents that were created for it.

    Only if this process created it, and no run has begun there or can begin.

    The block sets `made` once it owns the folder: if two launches use one folder concurrently, the
    one that fails leaves the folder to the other.
    """
    new_folders = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    folder = NewFolder(run_dir)
    try:
        yield folder
    finally:
        if folder.made and not folder.handed and not has_begun(run_dir):
            with logged_suppress(_log, f"{run_dir} was not removed", OSError):
                _remove(run_dir, new_folders)


def resume_command(run_dir: str | Path) -> str:
    """Return the shell command that continues a run."""
    return f"trainload resume {shlex.quote(str(run_dir))}"


def has_begun(run_dir: Path) -> bool:
    """Return True if a run in this folder has had a driver."""
    return (run_dir / JOURNAL).exists() or (run_dir / STATE_FILE).exists()


def _remove(run_dir: Path, new_folders: list[Path]) -> None:
    if not new_folders:  # the folder was there, perhaps with other files
        (run_dir / RUN_FILE).unlink()
        shutil.rmtree(run_dir / DRIVER_FOLDER, ignore_errors=True)
        return
    shutil.rmtree(run_dir)
    for path in new_folders[1:]:
        with suppress(OSError):  # another process uses it meanwhile
            path.rmdir()
