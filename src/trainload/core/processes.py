"""Process identity and names, detection of ended processes, and termination signals."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_REPEAT_SECONDS = 0.1


def name_process(name: str) -> None:
    """Name this process, as `ps -o comm` and `top` show it. Linux keeps the first 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process receive a signal when the thread of its parent ends that started it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def this_process() -> str:
    """Return an id of this process, or "" if it cannot be determined.

    It consists of the machine's boot id, the PID namespace, the PID and the process's start time.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_start_time(os.getpid())}"
    except (OSError, IndexError):
        return ""


def has_ended(process: str) -> bool | None:
    """Return True if the process with this id of `this_process` has ended; None if that cannot be
    determined from here.
    """
    parts = process.split(" ")
    this = this_process().split(" ")
    if len(parts) != len(this) or len(parts) != 4 or parts[:2] != this[:2]:
        return None
    try:
        return _start_time(int(parts[2])) != parts[3]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return None


def in_main_thread() -> bool:
    """Return True in the main thread, which is the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


def interrupt(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt: a handler of SIGTERM and SIGHUP that makes them like Ctrl-C."""
    cancel_abort()
    raise KeyboardInterrupt


def cancel_abort() -> None:
    """Let this process handle a SIGTERM that it has just received in its own time.

    In a process that is connected to a cluster, Ray's handler of fatal signals (Abseil's) runs
    before Python's. It sets an alarm that aborts the process three seconds later.
    """
    if "ray" in sys.modules:
        signal.alarm(0)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt within the block, like Ctrl-C, and restore
    the handlers afterwards.

    Handlers that the caller has set stay. Outside of the main thread nothing is changed.
    """
    if not in_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if is_nobodys(handler):
            signal.signal(number, interrupt)
    try:
        with _lost_interrupts_repeated():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT, SIGTERM and SIGHUP after the block, which may import modules
    that set their own. Outside of the main thread nothing can set one.
    """
    if not in_main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _lost_interrupts_repeated() -> Iterator[None]:
    """Interrupt the main thread again if a KeyboardInterrupt was raised where Python ignores it.

    That is in callbacks of weak references and in finalizers. Imports have such callbacks, which
    even leave a lock of the import system locked, on which other threads then wait forever.
    """
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def repeat(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        number = signal.SIGINT if usual else signal.SIGTERM
        timers.append(threading.Timer(_REPEAT_SECONDS, os.kill, (os.getpid(), number)))
        timers[-1].daemon = True
        timers[-1].start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()


@contextmanager
def termination_signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP within the block. Outside of the main thread nothing is
    changed.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unignored_handlers(*numbers: signal.Signals) -> dict[signal.Signals, Any]:
    """Return the signals that this process does not ignore, with their handlers.

    So signals that `nohup` or a background job of a shell ignores stay ignored.
    """
    handlers = {number: signal.getsignal(number) for number in numbers}
    return {
        number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN
    }


def is_nobodys(handler: Any) -> bool:
    """Return True if a signal's handler is Python's, Ray's or `interrupt`, not one that the caller
    has set.
    """
    is_default = handler in (signal.SIG_DFL, signal.default_int_handler, interrupt, None)
    return is_default or str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"


def _start_time(process: int) -> str:
    """Return the start time of a process in clock ticks of its machine, or "ended" for a zombie."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
