"""The place of a tick's runs and of the data that is written for it: a folder, or a URL.

Data is written into a folder. If the place is a URL, that folder is in the cache of this machine,
and what a run reads is sent to the URL before the run begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainload.core.canonical_json import sha256_bytes
from trainload.core.storage.interface import send_file
from trainload.core.storage.open_files import open_bounded
from trainload.core.storage.places import Where, is_url
from trainload.launching.node.cache import default_cache_dir


@dataclass(frozen=True, slots=True)
class TickPlace:
    """The place of a tick.

    Attributes:
        where: its folder or URL.
        folder: the folder for written data.
    """

    where: Where
    folder: Path

    @classmethod
    def of(cls, runs: str, line: str, tick: str) -> TickPlace:
        """Return the place of a tick of a line, below a folder or URL of runs."""
        if not is_url(runs):
            folder = Path(runs) / line / tick
            return cls(folder, folder)
        url = f"{runs.rstrip('/')}/{line}/{tick}"
        name = sha256_bytes(url.encode())[:16]
        return cls(url, default_cache_dir() / "retraining" / name)

    def run(self, name: str) -> Where:
        """Return the folder or URL of one of the tick's runs."""
        return self.where / name if isinstance(self.where, Path) else f"{self.where}/{name}"

    def shared(self, path: str) -> str:
        """Return the name by which all nodes read a written file.

        At a URL the file is sent first, with the files beside it.

        Raises:
            StorageError: it cannot be sent.
        """
        if isinstance(self.where, Path):
            return path
        files, beside = open_bounded(self.where), Path(path).parent
        for each in sorted(beside.iterdir()):
            name = str(each.relative_to(self.folder))
            if files.size(name) != each.stat().st_size:
                send_file(files, name, each)
        return f"{self.where}/{Path(path).relative_to(self.folder)}"
