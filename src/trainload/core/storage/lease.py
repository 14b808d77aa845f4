"""A numbered lease: one process at a time does something, on whatever machine.

    FOLDER/leases/00000007.json       the seventh lease and its holder; 7 is its fencing token
    FOLDER/heartbeats/00000007.json   its holder's last heartbeat, replaced
    FOLDER/stops/00000007.json        a request that its holder stops

A lease is taken by creating the file of the next number, which exactly one process does. It is over
when its holder says so, or has been silent for as long as the lease allows. A holder that was
paused for that long cannot know, between checking and acting, that another one has taken its place:
what must not happen twice compares the number where it acts.

    leases = Leases(files, "gc", where="the store", kinds=PLAIN, hint="Run it again.")
    held = leases.take(120.0)
    if isinstance(held, OtherLease): ...     # over in held.left seconds, unless it is renewed
    held.check()                             # before each action
    held.close()
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field

from trainload.core.errors import ConflictError, IntegrityError, StorageError
from trainload.core.logs import log_handled, logged_suppress
from trainload.core.processes import has_ended, this_process
from trainload.core.records import MAX_RECORD, Nonce, Sealed, Text, Time, now
from trainload.core.storage.interface import StoreFiles

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_BEATS = 6
"""Heartbeats in the time of a lease."""
_SURE = 2 / 3
"""Share of a lease's time for which its holder acts after the last heartbeat that was written."""
_WATCHED = 1 / 3
"""Share of a lease's time for which a lease that seems to be over is watched: the clocks of two
machines differ.
"""

LeaseId = Annotated[str, Field(pattern=r"^[0-9]{8}$")]
NOTHING: Mapping[str, Any] = MappingProxyType({})


class LeaseLostError(ConflictError):
    """The lease is no longer held by this process."""


class LeaseTakenError(ConflictError):
    """The lease is held by another process."""


class LeaseRecord(Sealed):
    """A lease that was taken.

    Attributes:
        owner: its holder, for people.
        process: what distinguishes the holder from all other processes of its machine; "" if that
            is unknown.
        seconds: how long its holder may be silent.
    """

    id: LeaseId
    owner: Text
    process: Text
    seconds: float
    created: Time
    nonce: Nonce


class Heartbeat(Sealed):
    """The last heartbeat of a lease's holder.

    Attributes:
        until: seconds since 1970, by the holder's clock.
        over: the holder has returned the lease.
    """

    id: LeaseId
    beat: int
    until: float
    over: bool
    nonce: Nonce


class StopRequest(Sealed):
    """A request that the holder of a lease stops."""

    id: LeaseId
    who: Text
    created: Time
    nonce: Nonce


R = TypeVar("R", bound=LeaseRecord)
S = TypeVar("S", bound=Sealed)


@dataclass(frozen=True, slots=True)
class Kinds(Generic[R]):
    """Classes of the records of some leases, which may have further fields."""

    lease: type[R]
    heartbeat: type[Heartbeat]
    stop: type[StopRequest]


PLAIN = Kinds(LeaseRecord, Heartbeat, StopRequest)


@dataclass(frozen=True, slots=True)
class OtherLease(Generic[R]):
    """A lease that another process holds.

    Attributes:
        left: seconds until it is over, unless it is renewed.
    """

    record: R
    left: float


class HeldLease(Generic[R]):
    """A lease that this process holds, and renews from a thread.

    Attributes:
        id: its number.
        owner: name of this process.
        previous: the number of the lease before it; None if it is the first.
        previous_returned: True if that was returned, or there was none.
    """

    def __init__(
        self, leases: Leases[R], record: R, previous: str | None, *, previous_returned: bool
    ) -> None:
        self._leases, self._record = leases, record
        self.id, self.owner = record.id, record.owner
        self.previous, self.previous_returned = previous, previous_returned
        self._sure_until = 0.0
        self._looked_at = -float("inf")
        self._beat = 0
        self._lost = ""
        self._stop: str | None = None
        self._over = threading.Event()
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._renew()
        self._thread = threading.Thread(target=self._keep_renewed, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            LeaseLostError: it does not, or cannot be sure.
        """
        if not self._lost and _seconds() > self._sure_until:
            if self._leases.regains:
                self._look_if_paused()
            else:
                self._lost = (
                    f"it could not be renewed for {self._record.seconds:g} s, or this process was"
                    " paused"
                )
        if self._lost:
            raise LeaseLostError(
                "the lease is lost",
                where=f"{self._leases.where}, lease {int(self.id)}",
                got=self._lost,
                hint=self._leases.hint,
            )

    @property
    def asked_to_stop(self) -> str | None:
        """Name of the process that requests a stop; None if there is none."""
        return self._stop

    def leave(self) -> None:
        """Stop renewing, so that the lease is over when its time is, and whoever takes it knows
        that it was not returned.
        """
        self._over.set()
        self._thread.join()

    def close(self) -> None:
        """Return the lease, if this process still holds it."""
        self.leave()
        if not self._lost and _seconds() <= self._sure_until:
            message = f"lease {int(self.id)} was not returned, so it ends by timeout"
            with logged_suppress(_log, message, StorageError):
                self._send_heartbeat(over=True)

    def _keep_renewed(self) -> None:
        while not self._over.wait(self._record.seconds / _BEATS):
            if _seconds() > self._sure_until and not self._leases.regains:
                return  # check() reports it
            try:
                self._check_for_successor()
                if self._lost:
                    return
                self._renew()
                stop = self._leases.stop_of(self.id)
            except (StorageError, IntegrityError) as error:
                log_handled(_log, f"lease {int(self.id)} was not renewed; will retry", error)
                continue
            if stop is not None:
                self._stop = stop.who

    def _look_if_paused(self) -> None:
        """Look for a successor if the thread could not: the process was paused. Otherwise it does,
        and the caller need not wait for storage that does not respond.
        """
        with self._looking:
            if _seconds() - self._looked_at > self._record.seconds:
                with suppress(StorageError, IntegrityError):
                    self._check_for_successor()

    def _check_for_successor(self) -> None:
        """Notice that another process has taken the lease."""
        self._looked_at = _seconds()
        last = self._leases.last()
        if last is not None and last != self.id:
            self._lost = f"another process has taken lease {int(last)}"

    def _renew(self) -> None:
        began = _seconds()
        self._send_heartbeat(over=False)
        self._sure_until = began + _SURE * self._record.seconds

    def _send_heartbeat(self, *, over: bool) -> None:
        with self._lock:
            self._beat += 1
            self._leases.say(
                self.id,
                self._record.nonce,
                beat=self._beat,
                until=time.time() + self._record.seconds,
                over=over,
            )


class Leases(Generic[R]):
    """The leases of one folder.

    Args:
        files: of a store or a run's folder.
        folder: path of the folder in it.
        where: what messages call it.
        kinds: classes of the records; `PLAIN` has no further fields.
        hint: what the error of a lost lease advises.
        fields: values of the further fields that all records of these leases have.
        owner: name of this process. Default: its host and number.
        regains: a holder that was silent for too long holds the lease again if nobody has taken it
            meanwhile. For work that outlives failures of its storage, and checks the lease often.
    """

    def __init__(
        self,
        files: StoreFiles,
        folder: str,
        *,
        where: str,
        kinds: Kinds[R],
        hint: str,
        fields: Mapping[str, Any] = NOTHING,
        owner: str | None = None,
        regains: bool = False,
    ) -> None:
        self._files, self._folder, self._kinds, self._fields = files, folder, kinds, dict(fields)
        self.where, self.hint, self.regains = where, hint, regains
        self.owner = owner or f"{socket.gethostname()}, process {os.getpid()}"

    def last(self) -> str | None:
        """Return the number of the last lease; None if there is none."""
        names = [name.removesuffix(".json") for name in self._files.names(f"{self._folder}/leases")]
        return names[-1] if names else None

    def other(self) -> OtherLease[R] | None:
        """Return the lease that is held now; None if nobody holds one."""
        last = self.last()
        return None if last is None else self._find_active(last)

    def take(self, seconds: float, **fields: Any) -> HeldLease[R] | OtherLease[R]:
        """Take the lease if nobody holds it.

        Args:
            seconds: how long this process may be silent before the lease is over.
            fields: values of the record's further fields.

        Returns:
            The lease; or the one that another process holds.

        Raises:
            StorageError: the place cannot be reached or written.
        """
        while True:
            last = self.last()
            other = None if last is None else self._find_active(last)
            if other is not None:
                return other
            number = f"{1 if last is None else int(last) + 1:08d}"
            record = self._kinds.lease(
                **self._fields,
                **fields,
                id=number,
                owner=self.owner,
                process=this_process(),
                seconds=seconds,
                created=now(),
                nonce=secrets.token_hex(16),
            )
            if self._files.create(f"{self._folder}/leases/{number}.json", record.to_bytes()):
                beat = None if last is None else self._heartbeat(last)
                return self._hold(
                    record, last, previous_returned=last is None or (beat is not None and beat.over)
                )

    def _hold(self, record: R, previous: str | None, *, previous_returned: bool) -> HeldLease[R]:
        return HeldLease(self, record, previous, previous_returned=previous_returned)

    def ask_to_stop(self, lease: str) -> None:
        """Request that the holder of a lease stops."""
        request = self._kinds.stop(
            **self._fields, id=lease, who=self.owner, created=now(), nonce=secrets.token_hex(16)
        )
        self._files.create(f"{self._folder}/stops/{lease}.json", request.to_bytes())

    def stop_of(self, lease: str) -> StopRequest | None:
        """Return the request that the holder of a lease stops; None if there is none."""
        return self._read(self._kinds.stop, f"{self._folder}/stops/{lease}.json")

    def say(self, lease: str, nonce: str, *, beat: int, until: float, over: bool) -> None:
        """Write a heartbeat."""
        heartbeat = self._kinds.heartbeat(
            **self._fields, id=lease, beat=beat, until=until, over=over, nonce=nonce
        )
        self._files.replace(f"{self._folder}/heartbeats/{lease}.json", heartbeat.to_bytes())

    def forget_before(self, lease: str) -> None:
        """Remove the files of earlier leases.

        The last one stays, so that no number is taken twice.
        """
        for folder in ("stops", "heartbeats", "leases"):
            for name in self._files.names(f"{self._folder}/{folder}"):
                if name < f"{lease}.json":
                    self._files.delete(f"{self._folder}/{folder}/{name}")

    def _find_active(self, lease: str) -> OtherLease[R] | None:
        """Return the lease of this number, unless its holder is known to have ended or returned it.

        A lease that seems to be over is watched before: the clocks of two machines differ.
        """
        record = self._read(self._kinds.lease, f"{self._folder}/leases/{lease}.json")
        if record is None:
            raise IntegrityError("a lease has no record", where=f"{self.where}, lease {int(lease)}")
        if record.id != lease:
            raise IntegrityError(
                "a lease record has the wrong number",
                where=f"{self.where}, lease {int(lease)}",
                got=record.id,
            )
        seen = self._heartbeat(lease)
        if (seen is not None and seen.over) or has_ended(record.process):
            return None
        until = seen.until if seen is not None else _timestamp_of(record.created) + record.seconds
        if until > time.time():
            return OtherLease(record, until - time.time())
        watched = time.monotonic() + _WATCHED * record.seconds
        while time.monotonic() < watched:
            time.sleep(min(_POLL_SECONDS, record.seconds / _BEATS))
            later = self._heartbeat(lease)
            if later is not None and (seen is None or later.beat != seen.beat):
                return (
                    None if later.over else OtherLease(record, max(0.0, later.until - time.time()))
                )
        return None

    def _heartbeat(self, lease: str) -> Heartbeat | None:
        return self._read(self._kinds.heartbeat, f"{self._folder}/heartbeats/{lease}.json")

    def _read(self, kind: type[S], path: str) -> S | None:
        data = self._files.read(path, MAX_RECORD)
        return None if data is None else kind.from_bytes(data, f"{self._files.url}/{path}")


def _seconds() -> float:
    """Return a clock that continues while a machine sleeps, if there is one."""
    return (
        time.clock_gettime(time.CLOCK_BOOTTIME)
        if hasattr(time, "CLOCK_BOOTTIME")
        else time.monotonic()
    )


def _timestamp_of(created: str) -> float:
    return datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
