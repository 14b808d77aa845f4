"""End the fork servers of ranks that tests have started."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from pathlib import Path

from trainload.launching.ranks.server_socket import short_path


def server_pids(runtime: Path) -> list[int]:
    """Return the process ids of the servers whose sockets are in XDG_RUNTIME_DIR."""
    pids = []
    for path in runtime.rglob("*.socket"):
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                with short_path(path) as address:
                    connection.connect(address)
            except OSError:  # it has ended
                continue
            with connection.makefile("r") as lines:
                pids += [json.loads(line)["server"] for line in lines.readlines(1)]
    return pids


def end_servers(runtime: Path) -> None:
    """End the servers whose sockets are in XDG_RUNTIME_DIR, and wait for their ends."""
    for pid in server_pids(runtime):
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([descriptor], [], [])
        os.close(descriptor)
