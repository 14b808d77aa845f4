"""Records of a line's ticks in a store: one for each stage, written once, in the order of the
stages.

    lines/LINE/ticks/20261123T060000Z/pinned.json      configuration and parent
    .../data.json  begun-0001.json  trained.json  evaluated.json  decided.json  ended.json

A stage with a record is done, regardless of the process that did it. So a tick that was interrupted
resumes after its last record. If two processes write the same record, because one was suspended
past the end of its lease, the first one counts.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from trainload.core.errors import IntegrityError, RequestError, StorageError
from trainload.core.records import MAX_RECORD, Nonce, Record, Sealed, Text, Time, now
from trainload.packaging.format.field_types import Sha256
from trainload.packaging.stores.releases import Line, ReleaseId
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Outcome
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.ticks.gate import Check

Name = Annotated[str, Field(pattern=r"^[0-9]{8}T[0-9]{6}Z$")]
"""Name of a tick: its scheduled time."""
_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_READERS = 32


class TickRecord(Sealed):
    """A record of a tick.

    `line` and `tick` must match its path; `created` is the time of writing.
    """

    KIND: ClassVar[str]

    line: Line
    tick: Name
    created: Time
    nonce: Nonce

    @property
    def file(self) -> str:
        """Name of its file without .json."""
        return self.KIND


class Pinned(TickRecord):
    """Inputs of a tick, fixed at its beginning.

    Attributes:
        config: configuration of the retraining, as JSON.
        parent: the current release: the champion, from which the challenger starts unless the
            configuration says to start from the first release.
        package: digest of the parent's package.
        pointer: entry of the line's history of `current` that made the parent current.
        versions: versions of python, trainload, torch and ray.
    """

    KIND = "pinned"

    config: Annotated[str, Field(max_length=2**20)]
    parent: ReleaseId
    package: Sha256
    pointer: ReleaseId
    versions: dict[str, Text]


class Taken(TickRecord):
    """The data of a tick."""

    KIND = "data"

    snapshot: Snapshot


class NumberedRecord(TickRecord):
    """A record of which a tick may have several, one for each attempt (1-based `number`)."""

    number: Annotated[int, Field(ge=1, le=9999)]

    @property
    def file(self) -> str:
        """Name of its file without .json."""
        return f"{self.KIND}-{self.number:04d}"


class Begun(NumberedRecord):
    """The beginning of an attempt of a tick, by `owner` under a lease."""

    KIND = "begun"

    lease: ReleaseId
    owner: Text


class Failed(NumberedRecord):
    """The failure of an attempt of a tick."""

    KIND = "failed"

    error: Text
    message: Text


class Trained(TickRecord):
    """A trained challenger.

    Attributes:
        release: release under which it was published as a candidate.
        package: digest of its package.
        run_dir: folder of the run.
        checkpoint: the run's last checkpoint, with the optimizer state.
        steps: number of updates.
        first_loss: training loss of the first step.
        last_loss: training loss of the last step.
        rows: number of training rows.
        plan: strategy, number of ranks and global batch of the plan.
        seconds: stage -> duration in seconds; "first step" is the time from the start of the tick
            in this process to the end of the run's first step.
        sent_bytes: bytes that were published; the store had the others already.
        restarts: number of restarts of the run's workers.
    """

    KIND = "trained"

    release: ReleaseId
    package: Sha256
    run_dir: Text
    checkpoint: Text
    steps: Annotated[int, Field(ge=1)]
    first_loss: float
    last_loss: float
    rows: int
    plan: dict[str, str | int]
    seconds: dict[str, float]
    sent_bytes: int
    restarts: int


class Scores(Record):
    """Loss and metrics of a package on held-out rows, also for each slice.

    Non-finite values are None.
    """

    loss: float | None
    metrics: dict[str, float | None]
    rows: int
    slices: dict[str, Scores]

    @property
    def values(self) -> dict[str, float | None]:
        """Values of loss and metrics by name."""
        return {"loss": self.loss, **self.metrics}


class Evaluated(TickRecord):
    """Scores of champion and challenger on the same held-out rows."""

    KIND = "evaluated"

    champion: Scores
    challenger: Scores


class Decided(TickRecord):
    """Decision of the gate.

    Attributes:
        promote: True if the challenger becomes current.
        reason: reason for the decision.
        warnings: findings that do not reject the challenger.
        checks: all comparisons, with both sides.
        drift: column -> drift of its values from the champion's data.
    """

    KIND = "decided"

    promote: bool
    reason: Text
    warnings: tuple[Text, ...]
    checks: tuple[Check, ...]
    drift: dict[str, float]


class Ended(TickRecord):
    """The end of a tick, after which nothing more is done for it.

    Attributes:
        outcome: its outcome.
        reason: explanation of the outcome.
        release: the challenger, if there is one.
        pointer: entry of the history of `current` that promoted it, if it was promoted.
        warnings: other problems, such as a failed hook or cleanup.
    """

    KIND = "ended"

    outcome: Outcome
    reason: Text
    release: ReleaseId | None
    pointer: ReleaseId | None
    warnings: tuple[Text, ...]


R = TypeVar("R", bound=TickRecord)


class Ticks:
    """Records of a line's ticks."""

    def __init__(self, store: Store, line: str) -> None:
        self._files, self._line = store.files, line
        self._root = f"lines/{line}/ticks"

    def names(self) -> list[str]:
        """Return the names of all ticks that were begun, in the order of their times."""
        return [name for name in self._files.names(self._root) if _NAME.fullmatch(name)]

    def read(self, kind: type[R], tick: str, file: str | None = None) -> R | None:
        """Read a record; return None if the tick has none of this kind.

        Raises:
            IntegrityError: the record is damaged.
        """
        path = f"{self._root}/{tick}/{file or kind.KIND}.json"
        data = self._files.read(path, MAX_RECORD)
        if data is None:
            return None
        record = kind.from_bytes(data, f"{self._files.url}/{path}")
        if (record.line, record.tick) != (self._line, tick):
            raise IntegrityError(
                "a record in the store belongs to something else", where=f"{self._files.url}/{path}"
            )
        return record

    def read_required(self, kind: type[R], tick: str) -> R:
        """Read a record. Raises IntegrityError if it does not exist."""
        record = self.read(kind, tick)
        if record is None:
            raise IntegrityError(
                f"a tick has no record {kind.KIND}", where=f"{self._files.url}/{self._root}/{tick}"
            )
        return record

    def of_all(self, kind: type[R], ticks: Sequence[str] | None = None) -> dict[str, R]:
        """Return tick -> its record of a kind, for all ticks that have one."""
        names = self.names() if ticks is None else ticks
        with ThreadPoolExecutor(_READERS) as pool:
            records = pool.map(lambda tick: self.read(kind, tick), names)
            return {
                tick: record
                for tick, record in zip(names, records, strict=True)
                if record is not None
            }

    def draft(self, kind: type[R], tick: str, **fields: Any) -> R:
        """Create a record without writing it."""
        return kind(
            line=self._line, tick=tick, created=now(), nonce=secrets.token_hex(16), **fields
        )

    def write(self, kind: type[R], tick: str, **fields: Any) -> R:
        """Write a record unless it exists; return the record in the store.

        Raises:
            StorageError: the record is too large, or the store cannot be written.
            PackageError: the record is invalid.
        """
        record = self.draft(kind, tick, **fields)
        path = f"{self._root}/{tick}/{record.file}.json"
        data = record.to_bytes()
        if len(data) > MAX_RECORD:
            raise StorageError(
                "a tick's record is too large",
                where=f"{self._files.url}/{path}",
                expected=f"at most {MAX_RECORD} bytes",
                got=f"{len(data)} bytes",
                hint="Use fewer files per tick: shorten the window, or write larger files.",
            )
        # a record that cannot be read back would block the line forever
        kind.from_bytes(data, f"{self._files.url}/{path}")
        if self._files.create(path, data):
            return record
        stored = self.read(kind, tick, record.file)
        assert stored is not None, "records are never removed"
        return stored

    def count(self, kind: type[NumberedRecord], tick: str) -> int:
        """Return the number of a tick's records of a kind: its attempts, or its failures."""
        names = self._files.names(f"{self._root}/{tick}")
        return sum(name.startswith(f"{kind.KIND}-") for name in names)

    def last_failure(self, tick: str) -> Failed | None:
        """Return the last failure of a tick; None if it has not failed."""
        return (
            self.nth_failure(tick, self.count(Failed, tick)) if self.count(Failed, tick) else None
        )

    def nth_failure(self, tick: str, number: int) -> Failed | None:
        """Return the n-th failure of a tick (1-based); None if there were fewer."""
        names = [
            name
            for name in self._files.names(f"{self._root}/{tick}")
            if name.startswith(f"{Failed.KIND}-")
        ]
        return (
            self.read(Failed, tick, names[number - 1].removesuffix(".json"))
            if number <= len(names)
            else None
        )

    def begin(self, tick: str, lease: str, owner: str) -> Begun:
        """Record that an attempt of a tick begins."""
        return self.write(Begun, tick, number=self.count(Begun, tick) + 1, lease=lease, owner=owner)


def name_of(scheduled: datetime) -> str:
    """Return the name of the tick of a scheduled time.

    Raises RequestError if it has no time zone, or fractional seconds.
    """
    if scheduled.tzinfo is None or scheduled.microsecond:
        raise RequestError(
            "this is not a scheduled time",
            where=scheduled.isoformat(),
            expected="whole seconds, with a time zone",
        )
    return scheduled.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


def time_of(tick: str) -> datetime:
    """Return the scheduled time of a tick; the inverse of `name_of`."""
    return datetime.strptime(tick, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
