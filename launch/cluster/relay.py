"""Forward messages of a node's ranks to the driver, through the mailbox."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from trainload.core.errors import TrainloadError
from trainload.launching.cluster.mailbox import Beat, Mailbox, NodeReport
from trainload.launching.ranks.rank_messages import Flush, Flushed, Met, Printed
from trainload.launching.run.activity import Doing
from trainload.launching.run.contact import Request, Wanted
from trainload.launching.run.journal import Event

REPORT_SECONDS = 1.0
"""Interval of the reports of a node whose ranks send no events."""
_SEND_SECONDS = 0.1
"""Minimum interval of reports."""
_ANSWER_SECONDS = 20.0
_FLUSH_SECONDS = 30.0
_MAX_OUTPUT = 1 << 20


class RelayedRank(Protocol):
    """A rank whose messages are forwarded.

    Attributes:
        number: its rank.
        pid: id of its process.
        device: its device, for people.
    """

    number: int
    device: str

    @property
    def pid(self) -> int: ...

    def send(self, message: object) -> None:
        """Send a message to the rank."""


@dataclass(slots=True)
class _Pending:
    """Messages that have not been sent yet."""

    events: list[Event] = field(default_factory=list)
    printed: dict[int, str] = field(default_factory=dict)
    met: list[Wanted] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.events or self.printed or self.met)


class Relay:
    """Connection of a node's ranks to the driver through the mailbox.

    An unresponsive driver does not block the ranks. Each report has a number, and is repeated until
    the mailbox has acknowledged it, so that it counts once.

    Args:
        mailbox: the actor.
        attempt: number of the attempt.
        node: id of this node.
    """

    def __init__(self, mailbox: ActorHandle[Mailbox], attempt: int, node: str) -> None:
        self._mailbox: Any = mailbox
        self._attempt = attempt
        self._node = node
        self._lock = threading.Lock()
        self._pending = _Pending()
        self._failure: TrainloadError | None = None
        self._doing: dict[int, tuple[float, RelayedRank, Doing]] = {}
        self._ranks: list[RelayedRank] = []
        self._request: Wanted = Request.NONE
        self._number = 0
        self._report: NodeReport | None = None
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def add(self, rank: RelayedRank) -> None:
        """Add a rank, which receives the pending request, and those that follow."""
        with self._lock:
            self._ranks.append(rank)
            rank.send(self._request)  # in place of what a kept process has from its last attempt

    def receive(self, rank: RelayedRank, message: object) -> None:
        """Receive a message of a rank."""
        with self._lock:
            match message:
                case Event():
                    self._pending.events.append(message)
                case Doing():
                    self._doing[rank.number] = (time.monotonic(), rank, message)
                case Printed(text):
                    before = self._pending.printed.get(rank.number, "")
                    room = max(0, _MAX_OUTPUT - len(before))
                    self._pending.printed[rank.number] = before + text[:room]
                case Met(request):
                    self._pending.met.append(request)
                    self._request = Request.NONE if self._request == request else self._request
                case Flush(number):
                    threading.Thread(
                        target=self._flush_for, args=(rank, number), daemon=True
                    ).start()
        self._wake.set()

    def fail(self, error: TrainloadError) -> None:
        """Report the error that ends a rank; the first one counts."""
        with self._lock:
            self._failure = self._failure or error
        self._wake.set()

    def flush(self) -> None:
        """Wait until the driver's journal has all events, but at most 30 s, since the driver's
        storage may fail.
        """
        until = time.monotonic() + _FLUSH_SECONDS
        total: int | None = None
        while (remaining := until - time.monotonic()) > 0:
            answer = self.send(min(remaining, _ANSWER_SECONDS))
            if answer is not None:
                _, heard, written = answer
                total = heard if total is None else total
                if written >= total:
                    return
            time.sleep(_SEND_SECONDS)

    def close(self) -> None:
        """Stop sending."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_ANSWER_SECONDS)

    def _flush_for(self, rank: RelayedRank, number: int) -> None:
        self.flush()
        rank.send(Flushed(number))

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(REPORT_SECONDS)
            self._wake.clear()
            answer = self.send(_ANSWER_SECONDS)
            if answer is not None:
                self._pass_on(answer[0])
            self._closed.wait(_SEND_SECONDS)

    def _pass_on(self, request: Wanted) -> None:
        with self._lock:
            if request == self._request:
                return
            self._request = request
            for rank in self._ranks:
                rank.send(request)

    def send(self, timeout: float) -> tuple[Wanted, int, int] | None:
        """Send a report, or an earlier one again that was not acknowledged.

        Returns:
            The response of the mailbox to a new report; None if there is none, or to an earlier
            report, which lacks the newest messages.
        """
        with self._sending:
            is_repeated = self._report is not None
            with self._lock:
                now = time.monotonic()
                beats = [
                    Beat(number, self._node, rank.pid, rank.device, doing, now - at)
                    for number, (at, rank, doing) in self._doing.items()
                ]
                if self._report is None:
                    pending, self._pending = self._pending, _Pending()
                    self._number += 1
                    self._report = NodeReport(
                        pending.events, beats, pending.printed, pending.met, self._failure
                    )
            try:
                answer: tuple[Wanted, int, int] = ray.get(
                    self._mailbox.report.remote(
                        self._attempt, self._node, self._number, self._report
                    ),
                    timeout=timeout,
                )
            except RayError:  # the driver is unreachable: the report is repeated later
                return None
            self._report = None
            return None if is_repeated else answer  # there may be newer events
