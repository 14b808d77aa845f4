"""Files of profiles in a run's folder, or at its URL.

profiles/STEP/rank-N.trace.json.gz   the trace, for Perfetto and chrome://tracing
profiles/STEP/rank-N.json            the tables
"""

from __future__ import annotations

import json
from pathlib import Path

from trainload.core.errors import StorageError
from trainload.core.storage.folder_files import FolderFiles
from trainload.core.storage.interface import StoreFiles, send_file
from trainload.core.storage.open_files import open_bounded
from trainload.core.storage.places import is_url, local_path
from trainload.launching.profiling.profile_result import RankProfile, rank_profile_of

_SECONDS = 120.0
"""Time limit of one call to storage at a URL."""
_MOST_BYTES = 2**28


def profile_folder(step: int) -> str:
    """Return the path, within a run's folder, of the files of a profile whose first step has this
    number (from 1).
    """
    return f"profiles/{step}"


def trace_file(rank: int) -> str:
    """Return the name of a rank's trace."""
    return f"rank-{rank}.trace.json.gz"


def tables_file(rank: int) -> str:
    """Return the name of a rank's tables."""
    return f"rank-{rank}.json"


def write_profile(run_dir: str, profile: RankProfile, trace: Path) -> None:
    """Write the files of one rank.

    Args:
        run_dir: the run's folder, or its URL.
        profile: the rank's profile.
        trace: file with its trace.

    Raises:
        StorageError: they cannot be written.
    """
    files: StoreFiles = (
        open_bounded(run_dir, _SECONDS) if is_url(run_dir) else FolderFiles(local_path(run_dir))
    )
    folder = profile_folder(profile.step)
    send_file(files, f"{folder}/{trace_file(profile.rank)}", trace)
    content = json.dumps(profile.as_json(), indent=1).encode()
    files.replace(f"{folder}/{tables_file(profile.rank)}", content)


def read_profile(files: StoreFiles, step: int, rank: int) -> RankProfile:
    """Return a rank's profile from the files of a run.

    Raises:
        StorageError: it is missing, or storage cannot be reached.
    """
    path = f"{profile_folder(step)}/{tables_file(rank)}"
    content = files.read(path, _MOST_BYTES)
    if content is None:
        raise StorageError(
            "the profile of a rank is missing",
            where=f"{files.url}/{path}",
            hint="The nodes of the run must share its folder.",
        )
    return rank_profile_of(json.loads(content))
