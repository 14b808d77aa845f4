"""Messages between the workers of a run and its driver: an actor on the driver's node that holds
them until they are collected.

Neither side needs the run's storage to send messages. Only the driver writes the journal.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from trainload.core.errors import TrainloadError
from trainload.launching.run.activity import Activity, Doing
from trainload.launching.run.contact import Request
from trainload.launching.run.journal import Event

BEAT_SECONDS = 1.0
"""Interval of the heartbeats of a worker."""
_SEND_SECONDS = 0.1
_ANSWER_SECONDS = 20.0
_FLUSH_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_MAX_OUTPUT = 1 << 20


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a worker, received `age` seconds ago, with its node's id, its pid and
    its activity.
    """

    rank: int
    node: str
    pid: int
    doing: Doing
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Collected:
    """Messages that the driver has not acknowledged yet.

    Attributes:
        number: number by which the driver acknowledges them.
        events: events of the workers.
        beats: last heartbeat of each rank.
        failure: first TrainloadError that ended a worker of this attempt.
        met: requests that were fulfilled.
        order: rank of each of Ray Train's workers, by their number in Ray Train; empty before ranks
            are assigned.
        printed: rank -> its output.
    """

    number: int
    events: list[Event]
    beats: list[Beat]
    failure: TrainloadError | None
    met: list[Request]
    order: tuple[int, ...]
    printed: dict[int, str]


class Mailbox:
    """An actor that buffers messages between workers and driver.

    Messages from workers of an earlier attempt are dropped. Since a response to the driver may get
    lost, collected messages are kept, and returned again, until the driver has acknowledged them.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._request = Request.NONE
        self._number = 0
        self._heard = 0
        self._written = 0
        self._events: list[Event] = []
        self._senders: dict[str, int] = {}
        self._beats: dict[int, tuple[float, Beat]] = {}
        self._failure: TrainloadError | None = None
        self._met: list[Request] = []
        self._order: tuple[int, ...] = ()
        self._printed: dict[int, str] = {}
        self._out_events: list[Event] = []
        self._out_met: list[Request] = []
        self._out_printed: dict[int, str] = {}

    def begin(self, attempt: int) -> None:
        """Start a new attempt: discard the state of the previous one."""
        self._attempt, self._failure = attempt, None
        self._senders, self._beats, self._met, self._out_met, self._order = {}, {}, [], [], ()

    def seat(self, attempt: int, order: tuple[int, ...]) -> None:
        """Record the rank of each of Ray Train's workers."""
        if attempt == self._attempt:
            self._order = order

    def tell(
        self, attempt: int, sender: str, first: int, events: list[Event], beat: Beat | None
    ) -> tuple[Request, int, int]:
        """Receive events and a heartbeat of a worker.

        Args:
            attempt: number of the worker's attempt.
            sender: name of the sender, unique within the attempt.
            first: number of the first of these events, so that none counts twice after a lost
                response.
            events: events of the sender, in order.
            beat: heartbeat of the worker, if it sends one.

        Returns:
            The pending request of the run, the number of all events received so far, and the number
            of these that are in the journal.
        """
        if attempt == self._attempt:
            received = self._senders.get(sender, 0)
            new = events[max(0, received - first) :]
            self._events += new
            self._heard += len(new)
            self._senders[sender] = max(received, first + len(events))
            if beat is not None:
                self._beats[beat.rank] = (time.monotonic(), beat)
        return self._request, self._heard, self._written

    def hear(self, attempt: int, rank: int, printed: str) -> None:
        """Receive output of a worker. If too much of it is uncollected, the rest is dropped."""
        if attempt == self._attempt:
            before = self._printed.get(rank, "")
            self._printed[rank] = before + printed[: max(0, _MAX_OUTPUT - len(before))]

    def fail(self, attempt: int, error: TrainloadError) -> None:
        """Record the error that ends a worker; the first one of an attempt counts."""
        if attempt == self._attempt and self._failure is None:
            self._failure = error

    def meet(self, attempt: int, request: Request) -> None:
        """Record that a worker has fulfilled a request."""
        if attempt == self._attempt:
            self._met.append(request)
            if self._request is request:
                self._request = Request.NONE

    def collect(self, request: Request, written: int, number: int) -> Collected:
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
        beats = [
            Beat(beat.rank, beat.node, beat.pid, beat.doing, now - at)
            for at, beat in self._beats.values()
        ]
        printed = dict(self._out_printed)
        return Collected(
            self._number,
            list(self._out_events),
            beats,
            self._failure,
            list(self._out_met),
            self._order,
            printed,
        )


class RayContact:
    """A worker's connection to the driver through its mailbox. An unresponsive driver does not
    block the worker.

    Args:
        mailbox: the actor.
        attempt: number of the attempt.
        rank: rank of this worker.
        sender: name that is unique within the attempt.
        pid: pid of this process.
        node: Ray's id of its node.
    """

    def __init__(
        self,
        mailbox: ActorHandle[Mailbox],
        attempt: int,
        rank: int,
        sender: str,
        pid: int,
        node: str,
    ) -> None:
        self._mailbox: Any = mailbox
        self._attempt, self._rank, self._sender, self._pid, self._node = (
            attempt,
            rank,
            sender,
            pid,
            node,
        )
        self._activity: Activity | None = None
        self._request = Request.NONE
        self._lock = threading.Lock()
        self._unsent: list[Event] = []
        self._sent = 0
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, kind: str, **data: Any) -> None:
        with self._lock:
            self._unsent.append(Event(kind, data, time.time()))

    def flush(self) -> None:
        """Wait until the driver's journal has all events, but at most 30 s, since the driver's
        storage may fail.
        """
        until = time.monotonic() + _FLUSH_SECONDS
        all_of_it: int | None = None
        while (remaining := until - time.monotonic()) > 0:
            answer = self._send(min(remaining, _ANSWER_SECONDS), beats=False)
            if answer is not None:
                _, heard, written = answer
                all_of_it = heard if all_of_it is None else all_of_it
                if written >= all_of_it:
                    return
            time.sleep(_SEND_SECONDS)

    def asked(self) -> Request:
        return self._request

    def met(self, request: Request) -> None:
        if self._request is request:
            self._request = Request.NONE
            self._mailbox.meet.remote(self._attempt, request)

    def printed(self, text: str) -> None:
        """Send output of this worker to the driver; of more than 1 MiB at once, only the beginning
        is kept.
        """
        with suppress(RayError):  # the driver is unreachable
            ray.get(
                self._mailbox.hear.remote(self._attempt, self._rank, text), timeout=_ANSWER_SECONDS
            )

    def report(self, activity: Activity) -> None:
        self._activity = activity
        self._thread = threading.Thread(target=self._run, name="contact", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        self._send(_CLOSE_SECONDS, beats=False)

    def _run(self) -> None:
        beaten = 0.0
        while not self._closed.wait(_SEND_SECONDS):
            if self._unsent or time.monotonic() - beaten >= BEAT_SECONDS:
                beaten = time.monotonic()
                answer = self._send(_ANSWER_SECONDS, beats=True)
                if answer is not None:
                    self._request = answer[0]

    def _send(self, timeout: float, *, beats: bool) -> tuple[Request, int, int] | None:
        """Send unsent events and a heartbeat; return the result of `Mailbox.tell`, or None if there
        is no response.
        """
        with self._sending:
            with self._lock:
                events = list(self._unsent)
            beat = None
            if beats and self._activity is not None:
                beat = Beat(self._rank, self._node, self._pid, self._activity.now())
            try:
                answer: tuple[Request, int, int] = ray.get(
                    self._mailbox.tell.remote(
                        self._attempt, self._sender, self._sent, events, beat
                    ),
                    timeout=timeout,
                )
            except RayError:  # the driver is unreachable: the events are kept and sent again later
                return None
            with self._lock:
                del self._unsent[: len(events)]
                self._sent += len(events)
            return answer
