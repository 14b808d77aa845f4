"""End the fork servers of ranks that tests have started."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path


def server_pids(runtime: Path) -> list[int]:
    """Return the process ids of the servers whose sockets are in XDG_RUNTIME_DIR, which they have
    among their arguments.
    """
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                status = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if any(argument.startswith(os.fsencode(runtime)) for argument in arguments):
                parents[int(folder.name)] = int(status[1])
    # a rank has the arguments of its server
    return [pid for pid, parent in parents.items() if parent not in parents]


def end_servers(runtime: Path) -> None:
    """End the servers whose sockets are in XDG_RUNTIME_DIR, and wait for their ends."""
    for pid in server_pids(runtime):
        try:
            descriptor = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        select.select([descriptor], [], [])
        os.close(descriptor)
