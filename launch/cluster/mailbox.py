"""Between the workers of a run and its driver: an actor beside the driver that holds what was said until the other side asks.

Neither side needs the run's storage to be heard. The driver alone writes the journal.
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
"""How often a worker says that it is there."""
_SEND_SECONDS = 0.1
_ANSWER_SECONDS = 20.0
_FLUSH_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_PRINTED = 1 << 20


@dataclass(frozen=True, slots=True)
class Beat:
    """What a worker last said, `age` seconds ago: `pid` on the node of this id, and what it does."""

    rank: int
    node: str
    pid: int
    doing: Doing
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What has come since what the driver has acknowledged. number: by which the driver acknowledges it. failure: the first error of ours
    that a worker of this attempt ended with. met: requests that were met. order: the rank of each of Ray Train's workers, by their number
    there; empty before they are seated. printed: rank -> what it has printed.
    """

    number: int
    events: list[Event]
    beats: list[Beat]
    failure: TrainloadError | None
    met: list[Request]
    order: tuple[int, ...]
    printed: dict[int, str]


class Mailbox:
    """The actor. `attempt`: a number; what workers of an attempt say that is over is dropped.

    An answer to the driver may get lost: what was handed out is kept, and handed out again, until the driver has acknowledged it.
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
        """A new attempt starts."""
        self._attempt, self._failure = attempt, None
        self._senders, self._beats, self._met, self._out_met, self._order = {}, {}, [], [], ()

    def seat(self, attempt: int, order: tuple[int, ...]) -> None:
        """Ray Train's workers have their ranks."""
        if attempt == self._attempt:
            self._order = order

    def tell(self, attempt: int, sender: str, first: int, events: list[Event], beat: Beat | None) -> tuple[Request, int, int]:
        """What a worker says. `first`: the number of the first of its events, so that none counts twice where the answer got lost.

        Returns: what is asked of the run; how many events were heard of in all, and how many of these the journal has.
        """
        if attempt == self._attempt:
            known = self._senders.get(sender, 0)
            new = events[max(0, known - first) :]
            self._events += new
            self._heard += len(new)
            self._senders[sender] = max(known, first + len(events))
            if beat is not None:
                self._beats[beat.rank] = (time.monotonic(), beat)
        return self._request, self._heard, self._written

    def hear(self, attempt: int, rank: int, printed: str) -> None:
        """What a worker has printed; of much of it that nobody collects, the beginning."""
        if attempt == self._attempt:
            before = self._printed.get(rank, "")
            self._printed[rank] = before + printed[: max(0, _PRINTED - len(before))]

    def fail(self, attempt: int, error: TrainloadError) -> None:
        """A worker ends with an error for people."""
        if attempt == self._attempt and self._failure is None:
            self._failure = error

    def meet(self, attempt: int, request: Request) -> None:
        """A worker has met a request."""
        if attempt == self._attempt:
            self._met.append(request)
            if self._request is request:
                self._request = Request.NONE

    def collect(self, request: Request, written: int, number: int) -> Collected:
        """What the driver asks for: all that came since. `request`: for rank 0; `written`: events that the journal has by now; `number`: of
        the last answer that the driver has, 0 where it has none.
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
        beats = [Beat(beat.rank, beat.node, beat.pid, beat.doing, now - at) for at, beat in self._beats.values()]
        printed = dict(self._out_printed)
        return Collected(self._number, list(self._out_events), beats, self._failure, list(self._out_met), self._order, printed)


class RayContact:
    """A worker's contact with the driver, through its mailbox. A driver that does not answer does not hold the worker up.

    Args:
        mailbox: the actor.
        attempt: which attempt of the run this is.
        rank: this worker's. sender: a name of its own within the attempt.
        pid: of this process. node: Ray's id of its node.
    """

    def __init__(self, mailbox: ActorHandle[Mailbox], attempt: int, rank: int, sender: str, pid: int, node: str) -> None:
        self._mailbox: Any = mailbox
        self._attempt, self._rank, self._sender, self._pid, self._node = attempt, rank, sender, pid, node
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
        """See `Contact`. The journal is on the driver's side, whose storage may fail: after half a minute this returns anyway."""
        until = time.monotonic() + _FLUSH_SECONDS
        all_of_it: int | None = None
        while (left := until - time.monotonic()) > 0:
            answer = self._send(min(left, _ANSWER_SECONDS), beats=False)
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
        """What this worker has printed; of more than a mebibyte at once, the beginning."""
        with suppress(RayError):  # the driver is away
            ray.get(self._mailbox.hear.remote(self._attempt, self._rank, text), timeout=_ANSWER_SECONDS)

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
        """Sends what is unsent, and what this rank does. Returns: what `Mailbox.tell` does; None where there is no answer."""
        with self._sending:
            with self._lock:
                events = list(self._unsent)
            beat = None
            if beats and self._activity is not None:
                beat = Beat(self._rank, self._node, self._pid, self._activity.now())
            try:
                answer: tuple[Request, int, int] = ray.get(
                    self._mailbox.tell.remote(self._attempt, self._sender, self._sent, events, beat), timeout=timeout
                )
            except RayError:  # the driver is away: what is unsent is kept, and sent again
                return None
            with self._lock:
                del self._unsent[: len(events)]
                self._sent += len(events)
            return answer
