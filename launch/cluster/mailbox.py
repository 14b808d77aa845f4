"""Messages between the workers of a run and its driver: an actor on the driver's node that holds
them until they are collected.

Neither side needs the run's storage to send messages. Only the driver writes the journal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainload.core.errors import TrainloadError
from trainload.launching.run.activity import Doing
from trainload.launching.run.contact import Request, Wanted
from trainload.launching.run.journal import Event

_MAX_OUTPUT = 1 << 20


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a worker.

    Attributes:
        rank: its rank.
        node: id of its node.
        pid: id of its process.
        device: its device, for people.
        doing: its activity.
        age: seconds since the heartbeat.
    """

    rank: int
    node: str
    pid: int
    device: str
    doing: Doing
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Messages of a node's ranks since its last report.

    Attributes:
        events: events, in order.
        beats: last heartbeat of each rank.
        printed: rank -> its output.
        met: requests that were fulfilled.
        failure: first error that ended a rank of the node in this attempt.
    """

    events: list[Event]
    beats: list[Beat]
    printed: dict[int, str]
    met: Sequence[Wanted]
    failure: TrainloadError | None


@dataclass(frozen=True, slots=True)
class Collected:
    """Messages that the driver has not acknowledged yet.

    Attributes:
        number: number by which the driver acknowledges them.
        events: events of the workers.
        beats: last heartbeat of each rank.
        failure: first TrainloadError that ended a worker of this attempt.
        met: requests that were fulfilled.
        printed: rank -> its output.
    """

    number: int
    events: list[Event]
    beats: list[Beat]
    failure: TrainloadError | None
    met: list[Wanted]
    printed: dict[int, str]


class Mailbox:
    """An actor that buffers messages between workers and driver.

    Messages from workers of an earlier attempt are dropped. Since a response to the driver may get
    lost, collected messages are kept, and returned again, until the driver has acknowledged them.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._request: Wanted = Request.NONE
        self._number = 0
        self._heard = 0
        self._written = 0
        self._events: list[Event] = []
        self._reports: dict[str, int] = {}
        self._beats: dict[int, tuple[float, Beat]] = {}
        self._failure: TrainloadError | None = None
        self._met: list[Wanted] = []
        self._printed: dict[int, str] = {}
        self._out_events: list[Event] = []
        self._out_met: list[Wanted] = []
        self._out_printed: dict[int, str] = {}
        self._makers: dict[str, str] = {}
        self._holders: dict[str, list[Any]] = {}

    def begin(self, attempt: int) -> None:
        """Start a new attempt: discard the state of the previous one.

        A request to it is discarded too, since it may have been made to that attempt alone.
        """
        self._attempt, self._failure, self._request = attempt, None, Request.NONE
        self._reports, self._beats, self._met, self._out_met = {}, {}, [], []
        self._makers, self._holders = {}, {}

    def claim_build(self, attempt: int, name: str, node: str) -> tuple[str, list[Any]]:
        """Return the node that makes a build in this attempt, which is the first that asks, and
        [actor of a node that has it], or [] if none has it yet.
        """
        if attempt != self._attempt:
            return node, []
        return self._makers.setdefault(name, node), self._holders.get(name, [])

    def add_build(self, attempt: int, name: str, holder: list[Any]) -> None:
        """Receive [actor of a node] that has a build."""
        if attempt == self._attempt:
            self._holders.setdefault(name, holder)

    def report(
        self, attempt: int, node: str, number: int, report: NodeReport
    ) -> tuple[Wanted, int, int]:
        """Receive a report of a node.

        Args:
            attempt: number of the node's attempt.
            node: id of the node.
            number: number of the report, from 1. A report that is repeated after a lost response
                does not count again.
            report: the report.

        Returns:
            The pending request of the run, the number of all events received so far, and the number
            of these that are in the journal.
        """
        if attempt == self._attempt and number > self._reports.get(node, 0):
            self._reports[node] = number
            self._events += report.events
            self._heard += len(report.events)
            now = time.monotonic()
            self._beats |= {beat.rank: (now - beat.age, beat) for beat in report.beats}
            for rank, text in report.printed.items():
                before = self._printed.get(rank, "")
                self._printed[rank] = before + text[: max(0, _MAX_OUTPUT - len(before))]
            self._failure = self._failure or report.failure
            self._met += report.met
            if self._request in report.met:
                self._request = Request.NONE
        return self._request, self._heard, self._written

    def collect(self, request: Wanted, written: int, number: int) -> Collected:
        """Return all messages that the driver has not acknowledged.

        Args:
            request: pending request for rank 0.
            written: number of events that are in the journal.
            number: number of the last response that the driver has received; 0 for none. It is
                thereby acknowledged.
        """
        self._request, self._written = request, written
        if number == self._number:
            self._out_events, self._out_met, self._out_printed = [], [], {}
        self._number += 1
        self._out_events, self._events = [*self._out_events, *self._events], []
        self._out_met, self._met = [*self._out_met, *self._met], []
        for rank, text in self._printed.items():
            self._out_printed[rank] = self._out_printed.get(rank, "") + text
        self._printed = {}
        now = time.monotonic()
        beats = [replace(beat, age=now - at) for at, beat in self._beats.values()]
        printed = dict(self._out_printed)
        return Collected(
            self._number,
            list(self._out_events),
            beats,
            self._failure,
            list(self._out_met),
            printed,
        )
