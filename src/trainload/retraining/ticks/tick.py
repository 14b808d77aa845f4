"""A tick: one scheduled time, run once. Each stage writes a record, and a stage with a record is
not repeated.

    pin -> snapshot of the data -> train -> evaluate -> decide -> promote or reject -> hand over,
    clean up, notify -> ended

So a tick can be killed anywhere and run again, on this or another machine, with the same result.
Effects outside of the store (runs, exports, notifications) are repeated if it is unknown whether
they were completed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import (
    ConflictError,
    DivergedError,
    PackageError,
    RequestError,
    RunInterrupted,
    TrainloadError,
)
from trainload.core.storage.lease import LeaseLostError, LeaseTakenError, OtherLease
from trainload.launching.api.request import versions
from trainload.launching.node.cache import in_use, leave
from trainload.packaging.stores.releases import Pointer, shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import MOST_ATTEMPTS, OWN, Config, Outcome, checked
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.ticks.gate import Verdict
from trainload.retraining.ticks.line_lease import Held, LineLeases
from trainload.retraining.ticks.tick_records import (
    Begun,
    Decided,
    Ended,
    Evaluated,
    Failed,
    Pinned,
    Scores,
    Taken,
    TickRecord,
    Ticks,
    Trained,
    name_of,
    time_of,
)

_POLL_SECONDS = 1.0
_LATE = 16
"""Number of the latest ticks among which unfinished ones are searched. There is at most one, unless
a process was paused at a bad moment.
"""

R = TypeVar("R", bound=TickRecord)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TickContext:
    """Context of a tick in progress.

    Attributes:
        line: line of the tick.
        name: name of the tick.
        store: store of the line.
        config: its pinned configuration, with this machine's own values for the keys in `OWN`.
        pinned: its record of the pin stage.
        held: lease under which it runs.
        began: start of its execution in this process, by `time.monotonic`.
    """

    line: str
    name: str
    store: Store
    config: Config
    pinned: Pinned
    held: Held
    began: float = field(default_factory=time.monotonic)

    @property
    def scheduled(self) -> datetime:
        """Scheduled time of the tick."""
        return time_of(self.name)


class Work(Protocol):
    """The stages of a tick.

    Every stage may be repeated, or run twice concurrently, by a process that has lost its lease.
    """

    def first(self, config: Config, store: Store) -> None:
        """Ensure that the line has a current release."""

    def check_fitting(self, config: Config, release: str) -> None:
        """Check that a retraining fits the release from which it would start."""

    def snapshot(self, trail: TickContext) -> Snapshot:
        """Inspect the data, and return its snapshot."""

    def train(self, trail: TickContext, snapshot: Snapshot) -> dict[str, Any]:
        """Train a challenger and publish it as a candidate; return the fields of `Trained`.

        Raises DivergedError.
        """

    def evaluate(
        self, trail: TickContext, snapshot: Snapshot, trained: Trained
    ) -> tuple[Scores, Scores]:
        """Return the scores of champion and challenger."""

    def decide(
        self, trail: TickContext, snapshot: Snapshot, trained: Trained, evaluated: Evaluated
    ) -> tuple[Verdict, dict[str, float]]:
        """Return the gate's verdict, and the drift of each column."""

    def after(self, trail: TickContext, ended: Ended) -> tuple[str, ...]:
        """Hand over, clean up and notify; return the problems that occurred."""


class Scheduler:
    """Runner of the ticks of a line.

    Args:
        config: configuration of the retraining. A tick that was begun with another one keeps it.
        work: implementation of the stages.
        say: called with progress messages.
        owner: name of this process; None for one made of its machine and pid.
        now: function that returns the time.
    """

    def __init__(
        self,
        config: Config,
        work: Work,
        say: Say,
        *,
        owner: str | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config, self._work, self._say, self._now = config, work, say, now
        self._store = Store(config.store, create=True)
        self._ticks = Ticks(self._store, config.line)
        self._leases = LineLeases(self._store, config.line, owner)

    def last_done(self) -> datetime | None:
        """Return the time of the last finished tick; None if there is none.

        An unfinished tick is still due.
        """
        ended = self._ticks.of_all(Ended, self._ticks.names()[-_LATE:])
        return time_of(max(ended)) if ended else None

    def tick(self, scheduled: datetime) -> Ended:
        """Run the tick of a scheduled time, unless it is finished. Earlier unfinished ticks are run
        first.

        Raises:
            RequestError: the time is in the future, or a later tick was begun.
            LeaseTakenError: another process runs a tick of the line, and the retraining does not
                wait for it, or not any longer.
            LeaseLostError: this process was paused or did not renew its lease for too long; it has
                done nothing since.
            TrainloadError: an error of a stage. The tick can be run again until its maximum number
                of attempts is reached.
        """
        name = name_of(scheduled)
        if scheduled > self._now():
            raise RequestError(
                "this time is in the future",
                where=name,
                expected=f"a time up to {self._now():%Y-%m-%dT%H:%M:%SZ}",
                got=name,
            )
        ended = self._ticks.read(Ended, name)
        if ended is not None:
            self._say(f"tick {name} has already run: {ended.outcome}, {ended.reason}")
            return ended
        before = in_use()
        self._work.first(self._config, self._store)
        held = self._lease(name)
        try:
            for earlier in self._unfinished(name):
                self._say(f"tick {earlier} was started but not finished: running it first")
                self._run(earlier, held)
            return self._run(name, held)
        finally:
            leave(but=before)
            held.close()

    # The lease

    def _lease(self, name: str) -> Held:
        asked_id: str | None = None
        rules = self._config.lease
        until = time.monotonic() + rules.patience.total_seconds()
        waits = False
        while isinstance(
            lease := self._leases.take_for(name, rules.seconds.total_seconds()), OtherLease
        ):
            if rules.taken == "forbid" or time.monotonic() > until:
                raise LeaseTakenError(
                    "another tick is running",
                    where=self._leases.where,
                    got=f"tick {lease.record.tick}, by {lease.record.owner}",
                    hint=(
                        f"Run this one again after it has ended, or in {max(1.0, lease.left):.0f} s"
                        " if its process no longer exists."
                    ),
                )
            if (
                rules.taken == "replace"
                and lease.record.tick < name
                and asked_id != lease.record.id
            ):
                self._leases.ask_to_stop(lease.record.id)
                asked_id = lease.record.id
                self._say(f"asking tick {lease.record.tick}, by {lease.record.owner}, to stop")
            elif not waits:
                self._say(f"waiting for tick {lease.record.tick}, by {lease.record.owner}")
            waits = True
            time.sleep(min(_POLL_SECONDS, rules.seconds.total_seconds() / 4))
        return lease

    def _unfinished(self, before: str) -> list[str]:
        """Return the unfinished ticks before a tick.

        Raises RequestError if a later one was begun and this one was not.
        """
        names = self._ticks.names()
        if before not in names and names and names[-1] > before:
            raise RequestError(
                "a later tick has already started",
                where=before,
                expected=f"a time after {names[-1]}",
                got=before,
            )
        late = [name for name in names if name < before][-_LATE:]
        ended = self._ticks.of_all(Ended, late)
        return [
            name
            for name in late
            if name not in ended and self._ticks.read(Pinned, name) is not None
        ]

    # Stages

    def _run(self, name: str, held: Held) -> Ended:
        held.check()
        pinned = self._ticks.read(Pinned, name) or self._pin(name)
        ended = self._ticks.read(Ended, name)  # perhaps by the previous holder of the lease
        if ended is not None:
            return ended
        config, unreadable = self._pinned_config(pinned)
        if config != self._config:
            self._say(f"tick {name} continues with the configuration that it started with")
        trail = TickContext(self._config.line, name, self._store, config, pinned, held)
        if self._ticks.read(Decided, name) is None and (
            why := unreadable or self._reason_to_give_up(trail)
        ):
            return self._end(trail, "failed", why)
        number = self._ticks.begin(name, held.id, held.owner).number
        try:
            return self._stages(trail)
        except (LeaseLostError, RunInterrupted):
            raise
        except TrainloadError as error:
            if self._ticks.read(Decided, name) is None:
                self._ticks.write(
                    Failed,
                    name,
                    number=number,
                    error=type(error).__name__,
                    message=str(error)[:8192],
                )
                if why := self._reason_to_give_up(trail):
                    self._end(trail, "failed", why)
            raise

    def _pinned_config(self, pinned: Pinned) -> tuple[Config, str]:
        """Return the pinned configuration of a tick, with this machine's own keys, and "".

        If it cannot be read, return this machine's configuration and the reason.
        """
        try:
            config = checked(
                parse_canonical(pinned.config.encode(), f"{pinned.tick}, pinned.json, config"),
                f"tick {pinned.tick}",
            )
        except TrainloadError as error:  # another version of trainload wrote it
            return (
                self._config,
                (
                    "its configuration cannot be read by this version of trainload:"
                    f" {' '.join(str(error).split())}"
                ),
            )
        return config.model_copy(update={key: getattr(self._config, key) for key in OWN}), ""

    def _reason_to_give_up(self, trail: TickContext) -> str:
        """Return the reason to give a tick up; "" if there is none."""
        failures, starts = (
            self._ticks.count(Failed, trail.name),
            self._ticks.count(Begun, trail.name),
        )
        last = self._ticks.last_failure(trail.name)
        if last is not None and failures >= trail.config.attempts:
            return f"it failed {failures} times, the last time with: {last.message}"
        return (
            f"it was started {starts} times and never finished" if starts >= MOST_ATTEMPTS else ""
        )

    def _pin(self, name: str) -> Pinned:
        current = self._store.current(self._config.line)
        if current is None:
            raise PackageError(
                "no release is current",
                where=self._leases.where,
                hint="Promote one with `trainload promote`.",
            )
        # before it is pinned, since a tick keeps its configuration
        self._work.check_fitting(self._config, current.release)
        return self._ticks.write(
            Pinned,
            name,
            config=canonical_json(self._config.to_json()).decode(),
            parent=current.release,
            package=current.package,
            pointer=current.id,
            versions=versions(),
        )

    def _stages(self, trail: TickContext) -> Ended:
        held = trail.held
        taken = self._ticks.read(Taken, trail.name)
        if taken is None:
            self._say(
                f"tick {trail.name}: release {shown(trail.pinned.parent)} is current; inspecting"
                " the data"
            )
            snapshot = self._work.snapshot(trail)
            taken = self._write(held, Taken, trail.name, snapshot=snapshot)
        snapshot = taken.snapshot
        if snapshot.refused:
            return self._end(trail, "bad data", snapshot.refused)
        if snapshot.empty:
            return self._end(trail, "no data", snapshot.empty)
        decided = self._ticks.read(Decided, trail.name)
        trained = self._ticks.read(Trained, trail.name)
        if decided is None:
            if trained is None:
                try:
                    self._check_stop_requested(held)
                    self._say(f"tick {trail.name}: training on {snapshot.rows:,} rows")
                    trained = self._write(
                        held, Trained, trail.name, **self._work.train(trail, snapshot)
                    )
                except DivergedError as error:
                    decided = self._write(
                        held,
                        Decided,
                        trail.name,
                        promote=False,
                        reason=str(error),
                        warnings=(),
                        checks=(),
                        drift={},
                    )
                except RunInterrupted:
                    held.check()
                    if held.asked_to_stop is None:
                        raise
                    return self._end(trail, "replaced", f"{held.asked_to_stop} asked it to stop")
            if trained is not None:
                decided = self._decide(trail, snapshot, trained)
        assert decided is not None, "a challenger, or why there is none, leads to a decision"
        return self._settle(trail, trained, decided)

    def _decide(self, trail: TickContext, snapshot: Snapshot, trained: Trained) -> Decided:
        held = trail.held
        evaluated = self._ticks.read(Evaluated, trail.name)
        if evaluated is None:
            champion, challenger = self._work.evaluate(trail, snapshot, trained)
            evaluated = self._write(
                held, Evaluated, trail.name, champion=champion, challenger=challenger
            )
        verdict, drift = self._work.decide(trail, snapshot, trained, evaluated)
        return self._write(
            held,
            Decided,
            trail.name,
            promote=verdict.promote,
            reason=verdict.reason,
            warnings=verdict.warnings,
            checks=verdict.checks,
            drift=drift,
        )

    def _settle(self, trail: TickContext, trained: Trained | None, decided: Decided) -> Ended:
        """Execute a decision."""
        if trained is None:
            return self._end(trail, "rejected", decided.reason, warnings=decided.warnings)
        if not decided.promote:
            trail.held.check()
            mark = self._store.mark_of(trail.line, trained.release)
            if mark is None:
                self._store.mark(trail.line, shown(trained.release), "rejected", decided.reason)
            return self._end(
                trail, "rejected", decided.reason, trained.release, warnings=decided.warnings
            )
        try:
            pointer = self._promote(trail, trained, decided)
        except LeaseLostError:
            raise
        except ConflictError as error:
            return self._end(
                trail, "conflict", str(error), trained.release, warnings=decided.warnings
            )
        return self._end(
            trail,
            "promoted",
            decided.reason,
            trained.release,
            pointer.id,
            warnings=decided.warnings,
        )

    def _promote(self, trail: TickContext, trained: Trained, decided: Decided) -> Pointer:
        """Make the challenger current, unless that was done by an earlier attempt.

        Raises:
            ConflictError: another release was made current since the tick began, or the challenger
                was rejected or removed meanwhile.
        """
        since = [
            entry for entry in self._store.history(trail.line) if entry.id > trail.pinned.pointer
        ]
        for entry in since:
            if entry.release == trained.release:
                return entry
        for entry in since:
            if entry.release != trail.pinned.parent:
                raise ConflictError(
                    "another release has become current in the meantime",
                    where=f"tick {trail.name}",
                    expected=(
                        f"release {shown(trail.pinned.parent)}, which the challenger was compared"
                        " with"
                    ),
                    got=f"release {shown(entry.release)}: {entry.reason}",
                )
        mark = self._store.mark_of(trail.line, trained.release)
        if mark is not None and mark.verdict != "candidate":
            raise ConflictError(
                f"the challenger was {mark.verdict} in the meantime",
                where=f"tick {trail.name}, release {shown(trained.release)}",
                expected="a candidate",
                got=mark.reason,
            )
        trail.held.check()
        pointer = self._store.promote(
            trail.line,
            shown(trained.release),
            after=trail.held.after,
            reason=f"tick {trail.name}: {decided.reason}"[:8192],
        )
        trail.held.after = pointer.id
        return pointer

    def _end(
        self,
        trail: TickContext,
        outcome: Outcome,
        reason: str,
        release: str | None = None,
        pointer: str | None = None,
        *,
        warnings: tuple[str, ...] = (),
    ) -> Ended:
        trail.held.check()
        fields: dict[str, Any] = {
            "outcome": outcome,
            "reason": reason[:8192],
            "release": release,
            "pointer": pointer,
        }
        draft = self._ticks.draft(Ended, trail.name, **fields, warnings=warnings)
        wrong = self._work.after(trail, draft)
        ended = self._write(trail.held, Ended, trail.name, **fields, warnings=(*warnings, *wrong))
        self._say(f"tick {trail.name}: {ended.outcome}: {ended.reason}")
        for text in ended.warnings:
            self._say(f"tick {trail.name}: warning: {text}")
        return ended

    def _write(self, held: Held, kind: type[R], tick: str, **fields: Any) -> R:
        held.check()
        return self._ticks.write(kind, tick, **fields)

    def _check_stop_requested(self, held: Held) -> None:
        if held.asked_to_stop is not None:
            raise RunInterrupted("the tick was asked to stop", where=held.asked_to_stop)
