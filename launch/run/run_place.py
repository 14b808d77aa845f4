"""The place of a run's records: a folder, or a URL.

A run at a URL has a working copy on each machine that drives or shows it: a folder with the run's
files, in which `.place` contains the URL. Whoever works with the folder of a run works with a copy
alike; `working_copy` and `publication` bring its files there and back.

Nothing here imports torch.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from trainload.core.errors import StorageError
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import StoreFiles
from trainload.core.storage.open_files import open_bounded

PLACE_FILE = ".place"
SECONDS = 20.0
"""Time limit of one call to the storage of a run's records."""
LEASE_SECONDS = 5.0
"""Time limit of one call for the lease of a run's driver, which is over after 15 seconds."""


def url_of(run_dir: Path) -> str | None:
    """Return the URL of the run of which a folder is a working copy; None for any other folder,
    also one that cannot be read: whoever reads its other files says so.
    """
    with suppress(OSError):
        return (run_dir / PLACE_FILE).read_text(encoding="utf-8")
    return None


def place_name(run_dir: Path) -> str:
    """Return what people call a run: its URL, or the path of its folder."""
    return url_of(run_dir) or str(run_dir)


def files_of(run_dir: Path, seconds: float = SECONDS) -> StoreFiles | None:
    """Return the files at the URL of the run of which a folder is a working copy; None for any
    other folder.

    Args:
        run_dir: the folder.
        seconds: time limit of one call.

    Raises:
        StorageError: the URL's library is not installed.
    """
    url = url_of(run_dir)
    return None if url is None else open_bounded(url, seconds)


def record_files(run_dir: Path, seconds: float = SECONDS) -> StoreFiles:
    """Return the files of a run's records: in its folder, or at its URL for a working copy. The
    arguments and errors are those of `files_of`.
    """
    return files_of(run_dir, seconds) or FolderFiles(run_dir)


def check_can_be_owned(files: StoreFiles) -> None:
    """Check that one process at a time can own what is at a URL.

    Raises:
        StorageError: it cannot, or the storage cannot be reached or written.
    """
    if not files.exclusive:
        raise StorageError(
            "runs cannot be stored there: two processes could drive one",
            where=files.url,
            expected="storage that creates a file only if it does not exist",
            hint="Use S3, Google Cloud Storage, Azure Blob Storage, or a folder.",
        )
