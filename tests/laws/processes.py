"""Find the processes that this one has started."""

from __future__ import annotations

import os
from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Return process id -> command line of all descendants of a process."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            parents[int(folder.name)] = int(status.rpartition(")")[2].split()[1])
    found: dict[int, str] = {}
    for child in parents:
        at = child
        while at in parents and at != pid:
            at = parents[at]
        if at == pid and child != pid:
            try:
                found[child] = (
                    (Path("/proc") / str(child) / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode()
                )
            except OSError:  # it has ended meanwhile
                continue
    return found


def ray_workers() -> list[int]:
    """Return the training workers of the Ray cluster that this process has started."""
    return [pid for pid, command in descendants(os.getpid()).items() if "RayTrainWorker" in command]
