"""What a store says of the ticks of a line: one record for each stage, written once, in the order of the stages.

    lines/LINE/ticks/20261123T060000Z/pinned.json      configuration and parent
    .../data.json  begun-0001.json  trained.json  evaluated.json  decided.json  ended.json

A stage whose record is there was done, whoever did it. So a tick that was broken off anywhere goes on from its last record, and of two
processes that write the same record, since one of them has slept past the end of its lease, the first one is right.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from trainload.core.errors import IntegrityError, RequestError, StorageError
from trainload.core.records import MAX_RECORD, Nonce, Record, Sealed, Text, Time, now
from trainload.packaging.format.manifest import Sha256
from trainload.packaging.stores.releases import Line, ReleaseId
from trainload.packaging.stores.store import Store
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.ticks.gate import Check

Outcome = Literal["promoted", "rejected", "conflict", "bad data", "no data", "replaced", "failed"]
"""How a tick ended. conflict: another release was made current meanwhile, by hand; the challenger stays a candidate. replaced: a later tick
asked it to stop. failed: it was begun as often as it may be."""
Name = Annotated[str, Field(pattern=r"^[0-9]{8}T[0-9]{6}Z$")]
"""A scheduled time, as the name of its tick."""
_NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z")
_READERS = 32


class TickRecord(Sealed):
    """A record of a tick: `line` and `tick` are those of its path. `created`: when it was written."""

    KIND: ClassVar[str]

    line: Line
    tick: Name
    created: Time
    nonce: Nonce

    @property
    def file(self) -> str:
        """The name of its file, without .json."""
        return self.KIND


class Pinned(TickRecord):
    """What a tick was begun with, and keeps whatever changes meanwhile.

    Attributes:
        config: the retraining, as JSON.
        parent: the release that was current: the champion, from which the challenger starts unless it starts from the first one.
        package: the parent's.
        pointer: the entry of the line's history of `current` that said so.
        versions: python, trainload, torch, ray.
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
    """A record of which a tick may have several: of its `number`th beginning."""

    number: Annotated[int, Field(ge=1, le=9999)]

    @property
    def file(self) -> str:
        """As of every record."""
        return f"{self.KIND}-{self.number:04d}"


class Begun(NumberedRecord):
    """A tick was begun, or gone on with, under the lease of this number, by `owner`."""

    KIND = "begun"

    lease: ReleaseId
    owner: Text


class Failed(NumberedRecord):
    """How a beginning of a tick failed."""

    KIND = "failed"

    error: Text
    message: Text


class Trained(TickRecord):
    """A challenger.

    Attributes:
        release: where it was published, as a candidate. package: its package.
        run_dir: the run's folder. checkpoint: its last one, with the optimizer's state.
        steps: updates. first_loss, last_loss: of training.
        rows: of the data. plan: strategy, ranks, and what else tells it.
        seconds: stage -> how long it took; "first step": from the beginning of the run to the end of its first step.
        sent_bytes: that were published; the others the store had.
        restarts: how often its workers were started again.
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
    """Of a package on held-out rows: loss, metrics, and the same for each slice. NaN is None."""

    loss: float | None
    metrics: dict[str, float | None]
    rows: int
    slices: dict[str, Scores]

    @property
    def values(self) -> dict[str, float | None]:
        """Loss and metrics by name."""
        return {"loss": self.loss, **self.metrics}


class Evaluated(TickRecord):
    """Champion and challenger on the same held-out rows."""

    KIND = "evaluated"

    champion: Scores
    challenger: Scores


class Decided(TickRecord):
    """What the gate said.

    Attributes:
        promote: whether the challenger becomes current.
        reason: why, or why not. warnings: what else there is to say.
        checks: every comparison, with both its sides.
        drift: column -> how far its values are from those of the champion's data.
    """

    KIND = "decided"

    promote: bool
    reason: Text
    warnings: tuple[Text, ...]
    checks: tuple[Check, ...]
    drift: dict[str, float]


class Ended(TickRecord):
    """How a tick ended. Nothing is done of it any more.

    Attributes:
        outcome: in a word; reason: in a sentence.
        release: the challenger, where there is one. pointer: the entry of the history of `current` by which it was promoted.
        warnings: what went wrong beside it: a hook, what was to be cleaned up.
    """

    KIND = "ended"

    outcome: Outcome
    reason: Text
    release: ReleaseId | None
    pointer: ReleaseId | None
    warnings: tuple[Text, ...]


R = TypeVar("R", bound=TickRecord)


class Ticks:
    """The records of a line's ticks."""

    def __init__(self, store: Store, line: str) -> None:
        self._files, self._line = store.files, line
        self._root = f"lines/{line}/ticks"

    def names(self) -> list[str]:
        """The ticks that were begun, in the order of their times."""
        return [name for name in self._files.names(self._root) if _NAME.fullmatch(name)]

    def read(self, kind: type[R], tick: str, file: str | None = None) -> R | None:
        """A record; None: the tick has none of this kind.

        Raises:
            IntegrityError: it is damaged.
        """
        path = f"{self._root}/{tick}/{file or kind.KIND}.json"
        data = self._files.read(path, MAX_RECORD)
        if data is None:
            return None
        found = kind.from_bytes(data, f"{self._files.url}/{path}")
        if (found.line, found.tick) != (self._line, tick):
            raise IntegrityError("a record in the store belongs to something else", where=f"{self._files.url}/{path}")
        return found

    def read_required(self, kind: type[R], tick: str) -> R:
        """A record that must be there. Raises: IntegrityError where it is not."""
        found = self.read(kind, tick)
        if found is None:
            raise IntegrityError(f"a tick has no record {kind.KIND}", where=f"{self._files.url}/{self._root}/{tick}")
        return found

    def of_all(self, kind: type[R], ticks: Sequence[str] | None = None) -> dict[str, R]:
        """Tick -> its record of a kind, of those that have one."""
        asked = self.names() if ticks is None else ticks
        with ThreadPoolExecutor(_READERS) as pool:
            found = pool.map(lambda tick: self.read(kind, tick), asked)
            return {tick: record for tick, record in zip(asked, found, strict=True) if record is not None}

    def draft(self, kind: type[R], tick: str, **fields: Any) -> R:
        """A record that is not written."""
        return kind(line=self._line, tick=tick, created=now(), nonce=secrets.token_hex(16), **fields)

    def write(self, kind: type[R], tick: str, **fields: Any) -> R:
        """Writes a record, unless there is one. Returns: the one that is there now.

        Raises:
            StorageError: it is too large, or the store cannot be written.
            PackageError: it breaks the rules of its kind.
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
        kind.from_bytes(data, f"{self._files.url}/{path}")  # what cannot be read again would stop the line for ever
        if self._files.create(path, data):
            return record
        there = self.read(kind, tick, record.file)
        assert there is not None, "records are never removed"
        return there

    def count(self, kind: type[NumberedRecord], tick: str) -> int:
        """How often a tick was begun, or has failed."""
        names = self._files.names(f"{self._root}/{tick}")
        return sum(name.startswith(f"{kind.KIND}-") for name in names)

    def last_failure(self, tick: str) -> Failed | None:
        """How a tick failed the last time that it did; None: it did not."""
        return self.nth_failure(tick, self.count(Failed, tick)) if self.count(Failed, tick) else None

    def nth_failure(self, tick: str, number: int) -> Failed | None:
        """The so-manieth failure of a tick, from 1 on; None: there were fewer."""
        names = [name for name in self._files.names(f"{self._root}/{tick}") if name.startswith(f"{Failed.KIND}-")]
        return self.read(Failed, tick, names[number - 1].removesuffix(".json")) if number <= len(names) else None

    def begin(self, tick: str, lease: str, owner: str) -> Begun:
        """Counts that a tick is begun."""
        return self.write(Begun, tick, number=self.count(Begun, tick) + 1, lease=lease, owner=owner)


def name_of(scheduled: datetime) -> str:
    """The name of a time's tick. Raises: RequestError where it has no zone, or parts of a second."""
    if scheduled.tzinfo is None or scheduled.microsecond:
        raise RequestError("this is not a scheduled time", where=scheduled.isoformat(), expected="whole seconds, with a time zone")
    return scheduled.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


def time_of(tick: str) -> datetime:
    """The inverse of `name_of`."""
    return datetime.strptime(tick, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
