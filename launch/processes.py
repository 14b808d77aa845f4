"""What tells a process from all others, and whether another one is known to have ended."""

from __future__ import annotations

import os
from pathlib import Path


def this_process() -> str:
    """What tells this process from others: the start of the machine, the space of process numbers, its number and its own start.

    "" where that is not known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_began(os.getpid())}"
    except (OSError, IndexError):
        return ""


def has_ended(process: str) -> bool | None:
    """Whether a process, as `this_process` called it there, has ended; None: that cannot be told from here."""
    parts = process.split(" ")
    own = this_process().split(" ")
    if len(parts) != len(own) or len(parts) != 4 or parts[:2] != own[:2]:
        return None
    try:
        return _began(int(parts[2])) != parts[3]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return None


def _began(process: int) -> str:
    """When a process began, in ticks of its machine; "ended" for one that waits for its parent to notice that it has."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
