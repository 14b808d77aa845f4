"""Files of sources, at a path or URL."""

from __future__ import annotations

from trainload.core.storage.bounded_files import BoundedFiles
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import StoreFiles
from trainload.core.storage.open_files import open_files


def bounded(folder: str) -> StoreFiles:
    """Return the files of a folder; calls to a URL have a time limit.

    Raises:
        StorageError: as `open_files`.
    """
    files = open_files(folder)
    return files if isinstance(files, FolderFiles) else BoundedFiles(files)
