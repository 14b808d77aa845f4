"""What tells a process from all others, whether another one is known to have ended, and how this one is told to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def in_main_thread() -> bool:
    """Whether this is the thread that may say what signals do."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def interrupted_by_signals() -> Iterator[Callable[[], None]]:
    """Within it SIGTERM, and the SIGHUP of a terminal that is closed, raise KeyboardInterrupt, as Ctrl-C does; afterwards they do what they
    did before. Where the caller has a handler of its own, that stays.

    Gives what sees to it again, for after code that sets a handler of its own, as `ray.init` does. In another thread than the main one
    nothing is changed.
    """
    if not in_main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def again() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.default_int_handler if is_nobodys(handler) else handler)

    again()
    try:
        yield again
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heeded(*numbers: signal.Signals) -> dict[signal.Signals, Any]:
    """Those of these signals that this process does not ignore, with their handlers. What `nohup` or a shell's background has it ignore
    stays ignored.
    """
    found = {number: signal.getsignal(number) for number in numbers}
    return {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}


def is_nobodys(handler: Any) -> bool:
    """Whether a signal's handler is Python's own, or Ray's, and none that a caller has set."""
    own = handler in (signal.SIG_DFL, signal.default_int_handler, None)
    return own or str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"


def _began(process: int) -> str:
    """When a process began, in ticks of its machine; "ended" for one that waits for its parent to notice that it has."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
