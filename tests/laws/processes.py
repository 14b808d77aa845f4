"""Find the processes of a run's ranks."""

from __future__ import annotations

from pathlib import Path

from trainload.launching.run.journal import read_events


def rank_pids(run_dir: Path) -> list[list[int]]:
    """Return the process ids of the ranks, by rank, for each attempt of a run on this machine."""
    return [
        [int(worker.rpartition(":")[2]) for worker in event.data["workers"]]
        for event in read_events(run_dir)
        if event.kind == "start"
    ]
