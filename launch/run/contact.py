"""Communication of a worker with the driver: events are sent, requests are received."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from trainload.core.errors import LostClusterError, StorageError
from trainload.core.logs import log_handled, logged_suppress
from trainload.core.storage.lease import LeaseLostError
from trainload.launching.run.activity import Activity
from trainload.launching.run.driver import CheckDriver
from trainload.launching.run.journal import Event, Journal, last_word
from trainload.launching.run.profile_request import (
    PROFILE_FILE,
    ProfileRequest,
    parse_profile_request,
)
from trainload.launching.run.run_state import (
    STATE_FILE,
    STATE_SECONDS,
    RankSeen,
    Summary,
    read_state,
    write_state,
)

_log = logging.getLogger(__name__)


class Request(IntEnum):
    """A request to a run. If there are several, the greatest value counts."""

    NONE = 0
    CHECKPOINT = 1
    STOP = 2

    @property
    def file(self) -> str:
        """Name of the file in the run's folder that makes this request."""
        return _FILES[self]


_FILES = {Request.CHECKPOINT: "checkpoint-now", Request.STOP: "stop"}
REQUESTS = tuple(_FILES)
"""Requests that have a file."""
REQUEST_FILES = (*_FILES.values(), PROFILE_FILE)
"""Names of the files of all requests."""
Wanted: TypeAlias = Request | ProfileRequest
"""The pending request of a run. A profile waits for the other requests."""


def asked_by_file(run_dir: Path) -> Wanted:
    """Return the request that the files in a run's folder make; NONE if storage fails."""
    with suppress(OSError):
        request = max(
            (request for request, name in _FILES.items() if (run_dir / name).exists()),
            default=Request.NONE,
        )
        return first_of(request, asked_profile(run_dir))
    return Request.NONE


def first_of(request: Request, other: Wanted | None) -> Wanted:
    """Return the one of two requests that is fulfilled first."""
    if isinstance(other, Request):
        return max(request, other)
    return other if other is not None and request is Request.NONE else request


def asked_profile(run_dir: Path) -> ProfileRequest | None:
    """Return the profile that is requested; None if there is none. A damaged file is removed.

    Raises OSError.
    """
    path = run_dir / PROFILE_FILE
    if not path.exists():
        return None
    try:
        return parse_profile_request(path.read_bytes())
    except ValueError as error:
        log_handled(_log, f"{path} is removed", error)
        path.unlink(missing_ok=True)
        return None


def asked_since_lost(run_dir: Path) -> bool:
    """Return True if a stop was requested after a lost driver last wrote the run's state, by the
    files' modification times.
    """
    state = read_state(run_dir)
    if state is None or (state.over and state.summary.error != LostClusterError.__name__):
        return False
    with suppress(OSError):
        return (run_dir / Request.STOP.file).stat().st_mtime_ns > (
            run_dir / STATE_FILE
        ).stat().st_mtime_ns
    return False


def take_back(run_dir: Path, *requests: Wanted) -> None:
    """Remove the files of requests that were fulfilled or are obsolete; of all requests if none is
    passed.

    Raises OSError.
    """
    for name in [request.file for request in requests] or REQUEST_FILES:
        (run_dir / name).unlink(missing_ok=True)


def withdraw(run_dir: Path, *requests: Wanted) -> None:
    """Remove files of requests like `take_back`. A failure is logged: they are fulfilled again."""
    message = f"requests to {run_dir} were not withdrawn, so they may be fulfilled again"
    with logged_suppress(_log, message, OSError):
        take_back(run_dir, *requests)


def clear_requests(run_dir: Path) -> None:
    """Remove the files of all requests before a run begins.

    Raises StorageError if that fails, since they would apply again.
    """
    try:
        take_back(run_dir)
    except OSError as error:
        raise StorageError(
            f"earlier requests to the run cannot be removed: {error.strerror}",
            where=str(run_dir),
            expected=f"no files {', '.join(REQUEST_FILES)}, or a writable folder",
            hint="Remove these files, then resume the run.",
        ) from error


class Contact(Protocol):
    """A rank's connection to the driver.

    Attributes:
        aborted: set when this attempt is to end, since another rank has failed.
        lingers: True if a thread of the attempt may still be at work after the attempt.
    """

    aborted: threading.Event
    lingers: bool

    def write(self, kind: str, **data: Any) -> None:
        """Send an event to the journal. It may not have arrived when this returns."""

    def flush(self) -> None:
        """Wait until the journal has all events so far, or the journal is not writable at the
        moment.
        """

    def asked(self) -> Wanted:
        """Return the pending request. Only rank 0 calls it."""

    def met(self, request: Wanted) -> None:
        """Record that a request was fulfilled, so that it is no longer pending."""

    def report(self, activity: Activity) -> None:
        """Start to report this rank's activity, until `close`."""

    def close(self) -> None:
        """Flush all events, and end the connection."""


class Published(Protocol):
    """Publisher of the records of a run; see `publication`."""

    def wait(self) -> None:
        """Wait until all events are where others can read them."""

    def check(self, warn: Callable[[str], None]) -> None:
        """Warn once if records cannot be published; raise StorageError if that takes too long."""


class FileContact:
    """A `Contact` without Ray: the worker itself writes the journal and reads request files. There
    is no hang detection.

    Args:
        run_dir: the run's folder.
        rank: rank of this worker. Rank 0 also writes the run's state for `trainload status`, from a
            thread.
        summary: summary of the run's events so far.
        check_driver: of rank 0: raises LeaseLostError if another process drives the run. Nothing is
            written then.
        published: publishes what is written.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        summary: Summary,
        check_driver: CheckDriver | None = None,
        published: Published | None = None,
    ) -> None:
        self.aborted, self.lingers = threading.Event(), False
        self._published = published
        self._run_dir, self._rank = run_dir, rank
        self._check_driver = check_driver
        self._journal = Journal(run_dir)
        self._summary = summary
        self._activity: Activity | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_state, name="state", daemon=True)

    def write(self, kind: str, **data: Any) -> None:
        self._record(Event(kind, data, time.time()))
        if self._published is not None:
            self._published.check(self._warn)

    def flush(self) -> None:
        """Wait until all events are published. In a folder they are written immediately."""
        if self._published is not None:
            self._published.wait()

    def asked(self) -> Wanted:
        return asked_by_file(self._run_dir)

    def met(self, request: Wanted) -> None:
        withdraw(self._run_dir, request)

    def report(self, activity: Activity) -> None:
        """Report the activity in the run's state, which only `trainload status` reads."""
        self._activity = activity
        if self._rank == 0:
            self._thread.start()

    def part(self, error: BaseException) -> None:
        """Write the error that ends the run to the journal, unless storage fails."""
        if self._rank == 0:
            message = "the error that ends the run was not written to its journal"
            with logged_suppress(_log, message, StorageError, LeaseLostError):
                self._record(last_word(error))

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._rank == 0:
            self._write_state(over=True)

    def _warn(self, message: str) -> None:
        self._record(Event("warning", {"message": message}, time.time()))

    def _record(self, event: Event) -> None:
        if self._check_driver is not None:
            self._check_driver()
        self._summary.take(event)
        self._journal.append([event])

    def _keep_state(self) -> None:
        self._write_state(over=False)
        while not self._closed.wait(STATE_SECONDS):
            self._write_state(over=False)

    def _write_state(self, *, over: bool) -> None:
        ranks = {}
        if self._activity is not None:
            ranks = {
                self._rank: RankSeen.of(
                    socket.gethostname(), os.getpid(), 0.0, self._activity.now()
                )
            }
        # repeated every second, so the next update may succeed
        message = "the state of the run was not written"
        with logged_suppress(_log, message, OSError, LeaseLostError, level=logging.DEBUG):
            if self._check_driver is not None:
                self._check_driver()
            write_state(self._run_dir, 1, self._summary, ranks, over=over)
