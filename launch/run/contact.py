"""How a worker talks to whoever runs it: what happened goes out, requests come in."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from trainload.core.errors import LostClusterError, StorageError
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.run.activity import Activity
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import Event, Journal, last_word
from trainload.launching.run.run_state import STATE_FILE, STATE_SECONDS, RankSeen, Summary, read_state, write_state


class Request(IntEnum):
    """What a run can be asked for; of several at once the greatest counts."""

    NONE = 0
    CHECKPOINT = 1
    STOP = 2

    @property
    def file(self) -> str:
        """Whoever makes a file of this name in the run's folder asks for it."""
        return _FILES[self]


_FILES = {Request.CHECKPOINT: "checkpoint-now", Request.STOP: "stop"}


def asked_by_file(run_dir: Path) -> Request:
    """What the files in a run's folder ask for. Storage that fails asks for nothing."""
    with suppress(OSError):
        return max((request for request, name in _FILES.items() if (run_dir / name).exists()), default=Request.NONE)
    return Request.NONE


def asked_since_lost(run_dir: Path) -> bool:
    """Whether a run whose last driver was lost was asked to stop after that driver's last word: by the times that their storage has."""
    state = read_state(run_dir)
    if state is None or (state.over and state.summary.error != LostClusterError.__name__):
        return False
    with suppress(OSError):
        return (run_dir / Request.STOP.file).stat().st_mtime_ns > (run_dir / STATE_FILE).stat().st_mtime_ns
    return False


def take_back(run_dir: Path, *requests: Request) -> None:
    """Removes the files of requests that were met, or concern an attempt that is over. Raises: OSError."""
    for request in requests or _FILES:
        (run_dir / request.file).unlink(missing_ok=True)


def clear_requests(run_dir: Path) -> None:
    """Removes the files of all requests, before a run begins. Raises: StorageError: they would be met again."""
    try:
        take_back(run_dir)
    except OSError as error:
        raise StorageError(
            f"what the run was asked for before cannot be removed: {error.strerror}",
            where=str(run_dir),
            expected=f"no files {' and '.join(_FILES.values())}, or a folder that can be written",
            hint="Remove them, and resume the run.",
        ) from error


class Contact(Protocol):
    """One rank's."""

    def write(self, kind: str, **data: Any) -> None:
        """Tells of an event, for the journal. It may be on its way when this returns."""

    def flush(self) -> None:
        """Returns when the journal has what was written so far, or cannot have it for now."""

    def asked(self) -> Request:
        """What the run was asked for. Called by rank 0 alone."""

    def met(self, request: Request) -> None:
        """A request was met; it is not asked again."""

    def report(self, activity: Activity) -> None:
        """From now on tells what this rank does, until `close`."""

    def close(self) -> None:
        """Nothing more will be said. What was written is flushed."""


class FileContact:
    """A worker that Ray does not run writes the journal and reads the files of requests itself. Nobody watches over it.

    Args:
        run_dir: the run's folder.
        rank: this worker's. Rank 0 also leaves word of the run for `trainload status`, from a thread.
        summary: what the run's events come to so far.
        check_driver: of rank 0: raises LeaseLostError if another process drives the run. Nothing is written then.
    """

    def __init__(self, run_dir: Path, rank: int, summary: Summary, check_driver: CheckDriver | None = None) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._check_driver = check_driver
        self._journal = Journal(run_dir)
        self._summary = summary
        self._activity: Activity | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="state", daemon=True)

    def write(self, kind: str, **data: Any) -> None:
        self._take(Event(kind, data, time.time()))

    def flush(self) -> None:
        """It is written already."""

    def asked(self) -> Request:
        return asked_by_file(self._run_dir)

    def met(self, request: Request) -> None:
        with suppress(OSError):  # storage that fails has it met again
            take_back(self._run_dir, request)

    def report(self, activity: Activity) -> None:
        """To `trainload status` alone."""
        self._activity = activity
        if self._rank == 0:
            self._thread.start()

    def part(self, error: BaseException) -> None:
        """Says with what the run ends. Where storage fails, there is the error alone."""
        if self._rank == 0:
            with suppress(StorageError, LeaseLostError):
                self._take(last_word(error))

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._rank == 0:
            self._leave_word(over=True)

    def _take(self, event: Event) -> None:
        if self._check_driver is not None:
            self._check_driver()
        self._summary.take(event)
        self._journal.append([event])

    def _tell(self) -> None:
        self._leave_word(over=False)
        while not self._closed.wait(STATE_SECONDS):
            self._leave_word(over=False)

    def _leave_word(self, *, over: bool) -> None:
        ranks = {}
        if self._activity is not None:
            ranks = {self._rank: RankSeen.of(socket.gethostname(), os.getpid(), 0.0, self._activity.now())}
        with suppress(OSError, LeaseLostError):  # storage that fails misses one of them
            if self._check_driver is not None:
                self._check_driver()
            write_state(self._run_dir, 1, self._summary, ranks, over=over)
