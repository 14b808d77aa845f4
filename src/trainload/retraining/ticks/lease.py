"""Who may run a line's ticks: one process at a time, on whatever machine.

    lines/LINE/leases/00000007.json       the seventh lease: its owner. Its number is its fencing number
    lines/LINE/heartbeats/00000007.json   its owner's last sign of life, written over
    lines/LINE/stops/00000007.json        somebody asks its owner to stop

A lease is taken by creating the file of the next number, which one of two processes does. It is over when its owner says so, or has been
silent for as long as the lease allows. An owner that was paused for that long cannot know that it is not the owner any more, between
looking and acting: so whoever takes its place first writes an entry into the line's history of `current` (`Store.confirm`). A promotion
must follow the entry that was the last one when the lease was taken, and the paused owner's no longer does.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from trainload.core.errors import ConflictError, IntegrityError, StorageError
from trainload.core.processes import has_ended, this_process
from trainload.packaging.stores.releases import MAX_RECORD, Line, Nonce, ReleaseId, Sealed, Text, Time, now, shown
from trainload.packaging.stores.store import Store

_POLL_SECONDS = 0.2
_BEATS = 6
"""Signs of life in the time of a lease."""
_SURE = 2 / 3
"""The share of a lease's time after which its owner does not act any more, without a sign of life that got through."""
_WATCHED = 1 / 3
"""The share of a lease's time for which one that seems to be over is watched."""

R = TypeVar("R", bound=Sealed)


class LeaseLostError(ConflictError):
    """The process that asked is not the owner of its lease any more."""


class LeaseTakenError(ConflictError):
    """Another process has the lease."""


class LeaseRecord(Sealed):
    """A lease that was taken.

    Attributes:
        owner: who has it, for people. process: what tells it from all other processes of its machine; "" where that is not known.
        tick: what for.
        seconds: how long its owner may be silent.
    """

    line: Line
    id: ReleaseId
    owner: Text
    process: Text
    tick: Text
    seconds: float
    created: Time
    nonce: Nonce


class Heartbeat(Sealed):
    """The last sign of life of a lease's owner. until: seconds since 1970, by its own clock. over: it has given the lease back."""

    line: Line
    id: ReleaseId
    beat: int
    until: float
    over: bool
    nonce: Nonce


class StopRecord(Sealed):
    """Somebody asks the owner of a lease to stop."""

    line: Line
    id: ReleaseId
    who: Text
    created: Time
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Other:
    """The lease that another process has: its number, who that is, for which tick, and seconds until it is over, unless it is renewed."""

    id: str
    owner: str
    tick: str
    left: float


class Held:
    """A lease that this process has.

    Attributes:
        id: its number. owner: what this process is called.
        after: the last entry of the line's history of `current` when it was taken: what a promotion must follow.
    """

    def __init__(self, leases: Leases, record: LeaseRecord, seconds: float) -> None:
        self._leases, self._record, self._seconds = leases, record, seconds
        self.id, self.owner = record.id, record.owner
        self.after: str | None = None
        self._sure_until = 0.0
        self._beat = 0
        self._lost = ""
        self._asked: str | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._renew()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still has the lease.

        Raises:
            LeaseLostError: it does not, or cannot be sure of it.
        """
        if not self._lost and _seconds() > self._sure_until:
            self._lost = f"nothing could be written for {self._seconds:g} s, or this process was paused"
        if self._lost:
            raise LeaseLostError(
                "the lease is lost",
                where=f"{self._leases.where}, lease {shown(self.id)}",
                got=self._lost,
                cure="Whoever has it now goes on with the tick; or run it again.",
            )

    @property
    def asked_to_stop(self) -> str | None:
        """Who asks that this tick stops; None: nobody does."""
        return self._asked

    def leave(self) -> None:
        """Says no more, so that the lease is over when its time is, and whoever takes it knows that it was not given back."""
        self._over.set()
        self._thread.join()

    def close(self) -> None:
        """Gives the lease back, if it is still there to be given."""
        self.leave()
        if not self._lost and _seconds() <= self._sure_until:
            with suppress(StorageError):  # then it is over when its time is
                self._say(over=True)

    def _keep(self) -> None:
        while not self._over.wait(self._seconds / _BEATS):
            if _seconds() > self._sure_until:
                return  # check() reports it
            try:
                last = self._leases.last()
                if last is not None and last != self.id:
                    self._lost = f"lease {shown(last)} was taken"
                    return
                self._renew()
                stop = self._leases.stop_of(self.id)
            except (StorageError, IntegrityError):
                continue
            if stop is not None:
                self._asked = stop.who

    def _renew(self) -> None:
        began = _seconds()
        self._say(over=False)
        self._sure_until = began + _SURE * self._seconds

    def _say(self, *, over: bool) -> None:
        with self._lock:
            self._beat += 1
            beat = Heartbeat(
                line=self._record.line,
                id=self.id,
                beat=self._beat,
                until=time.time() + self._seconds,
                over=over,
                nonce=self._record.nonce,
            )
            self._leases.say(beat)


class Leases:
    """The leases of a line.

    Args:
        store: its store, which must notice that another writer was first.
        line: the line.
        owner: what this process is called.

    Raises:
        StorageError: the store cannot write under a condition.
    """

    def __init__(self, store: Store, line: str, owner: str | None = None) -> None:
        if not store.files.exclusive:
            raise StorageError(
                "this store cannot write under a condition, so two schedulers could not be kept apart",
                where=store.url,
                cure="Use a folder, S3, or another place of docs/store.md that can.",
            )
        self._store, self._line = store, line
        self._owner = owner or f"{socket.gethostname()}, process {os.getpid()}"
        self._root = f"lines/{line}"

    @property
    def where(self) -> str:
        """What the line is called in messages."""
        return f"{self._store.url}, line {self._line}"

    def last(self) -> str | None:
        """The number of the last lease."""
        names = [name.removesuffix(".json") for name in self._store.files.names(f"{self._root}/leases")]
        return names[-1] if names else None

    def other(self) -> Other | None:
        """The lease that a process has at this moment; None: nobody has one."""
        last = self.last()
        return None if last is None else self._living(last)

    def take(self, tick: str, seconds: float) -> Held | Other:
        """Takes the lease, if nobody has it.

        Args:
            tick: what for, for those who ask.
            seconds: how long this process may be silent before it is lost.

        Returns:
            The lease; or the one that another process has.

        Raises:
            StorageError: the store cannot be reached or written.
        """
        while True:
            last = self.last()
            if last is not None and (other := self._living(last)) is not None:
                return other
            name = f"{int(last or 0) + 1:08d}"
            record = LeaseRecord(
                line=self._line,
                id=name,
                owner=self._owner,
                process=this_process(),
                tick=tick,
                seconds=seconds,
                created=now(),
                nonce=secrets.token_hex(16),
            )
            if not self._store.files.create(f"{self._root}/leases/{name}.json", record.to_bytes()):
                continue
            held = Held(self, record, seconds)
            try:
                held.after = self._fence(last, name)
            except BaseException:
                held.leave()  # not given back: whoever comes next must do what was not done here
                raise
            return held

    def ask_to_stop(self, lease: str) -> None:
        """Asks the owner of a lease to stop."""
        record = StopRecord(line=self._line, id=lease, who=self._owner, created=now(), nonce=secrets.token_hex(16))
        self._store.files.create(f"{self._root}/stops/{lease}.json", record.to_bytes())

    def stop_of(self, lease: str) -> StopRecord | None:
        """Who asks the owner of a lease to stop."""
        return self._read(StopRecord, f"{self._root}/stops/{lease}.json")

    def say(self, beat: Heartbeat) -> None:
        """Writes down a sign of life."""
        self._store.files.replace(f"{self._root}/heartbeats/{beat.id}.json", beat.to_bytes())

    def _fence(self, last: str | None, name: str) -> str | None:
        """Sees to it that the owner before cannot promote any more. Returns: the last entry of the history of `current`."""
        beat = None if last is None else self._heartbeat(last)
        if last is None or (beat is not None and beat.over):
            pointer = self._store.current(self._line)
        else:
            pointer = self._store.confirm(
                self._line, f"lease {shown(name)} takes the place of lease {shown(last)}, which was not given back"
            )
        return None if pointer is None else pointer.id

    def _living(self, lease: str) -> Other | None:
        """The lease of this number, if its owner is not known to be gone. One that seems to be silent for too long is watched
        before: clocks may differ.
        """
        record = self._read(LeaseRecord, f"{self._root}/leases/{lease}.json")
        if record is None:
            raise IntegrityError("a lease has no record", where=f"{self.where}, lease {shown(lease)}")
        seen = self._heartbeat(lease)
        if (seen is not None and seen.over) or has_ended(record.process):
            return None
        until = seen.until if seen is not None else _since_1970(record.created) + record.seconds
        if until > time.time():
            return Other(lease, record.owner, record.tick, until - time.time())
        watched = time.monotonic() + _WATCHED * record.seconds
        while time.monotonic() < watched:
            time.sleep(min(_POLL_SECONDS, record.seconds / _BEATS))
            again = self._heartbeat(lease)
            if again is not None and (seen is None or again.beat != seen.beat):
                return None if again.over else Other(lease, record.owner, record.tick, max(0.0, again.until - time.time()))
        return None

    def _heartbeat(self, lease: str) -> Heartbeat | None:
        return self._read(Heartbeat, f"{self._root}/heartbeats/{lease}.json")

    def _read(self, kind: type[R], path: str) -> R | None:
        data = self._store.files.read(path, MAX_RECORD)
        return None if data is None else kind.from_bytes(data, f"{self._store.url}/{path}")


def _seconds() -> float:
    """A clock that goes on while a machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _since_1970(created: str) -> float:
    return datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
