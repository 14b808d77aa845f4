"""Name and end of this process, by Linux's `prctl`."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Name this process, as `ps -o comm` and `top` show it. Linux keeps the first 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def end_with_parent() -> None:
    """Have this process killed when the thread of its parent ends that has started it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
