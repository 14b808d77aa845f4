"""Lineage of releases, and history of a line's ticks, read from the store alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from trainload.core.errors import StorageError
from trainload.packaging.stores.releases import Pointer, Release, ReleaseState, shown
from trainload.packaging.stores.store import Store
from trainload.retraining.ticks.tick_records import (
    Begun,
    Decided,
    Ended,
    Evaluated,
    Failed,
    Pinned,
    Taken,
    Ticks,
    Trained,
)

TICK, LINE, RELEASE, STORE = "tick", "migrated.line", "migrated.release", "migrated.store"
"""Names of a release's facts: the tick that created it, or the line, release and store from which
its weights were migrated.
"""
_READERS = 8

How = Literal["frozen", "retrained", "migrated"]


@dataclass(frozen=True, slots=True)
class TickStory:
    """A tick and its records.

    `begun` is the number of its attempts; a stage that was not reached is None.
    """

    name: str
    begun: int
    failures: tuple[Failed, ...]
    pinned: Pinned | None
    taken: Taken | None
    trained: Trained | None
    evaluated: Evaluated | None
    decided: Decided | None
    ended: Ended | None


@dataclass(frozen=True, slots=True)
class LineStory:
    """A line: the states of its releases, the history of its current release, and its ticks."""

    store: str
    line: str
    states: tuple[ReleaseState, ...]
    history: tuple[Pointer, ...]
    ticks: tuple[TickStory, ...]

    @property
    def changes(self) -> tuple[Pointer, ...]:
        """History without entries that repeat the previous release."""
        entries: list[Pointer] = []
        for entry in self.history:
            if not entries or entries[-1].release != entry.release:
                entries.append(entry)
        return tuple(entries)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A release in a lineage, which leads back to the first freeze.

    Attributes:
        store: store of the release.
        line: line of the release.
        state: the release and its state.
        tick: tick that created it; None if no tick did.
        how: "frozen": it has no parent; "retrained": the next ancestor is its parent in the same
            line; "migrated": its weights are from the next ancestor.
    """

    store: str
    line: str
    state: ReleaseState
    tick: TickStory | None
    how: How


def read_tick(ticks: Ticks, name: str) -> TickStory:
    """Read the records of a tick."""
    failures = tuple(
        each
        for number in range(1, ticks.count(Failed, name) + 1)
        if (each := ticks.nth_failure(name, number)) is not None
    )
    return TickStory(
        name=name,
        begun=ticks.count(Begun, name),
        failures=failures,
        pinned=ticks.read(Pinned, name),
        taken=ticks.read(Taken, name),
        trained=ticks.read(Trained, name),
        evaluated=ticks.read(Evaluated, name),
        decided=ticks.read(Decided, name),
        ended=ticks.read(Ended, name),
    )


def read_line(store: Store, line: str) -> LineStory:
    """Read a line from a store.

    Raises:
        StorageError: the line does not exist.
        IntegrityError: a record is damaged.
    """
    store.known_line(line)
    ticks = Ticks(store, line)
    with ThreadPoolExecutor(_READERS) as pool:
        stories = tuple(pool.map(lambda name: read_tick(ticks, name), ticks.names()))
    return LineStory(store.url, line, store.releases(line), store.history(line), stories)


def ancestry(store: Store, line: str, release: str | int | None = None) -> tuple[Ancestor, ...]:
    """Return a release, its parent, and so on up to the first freeze.

    Args:
        store: store of the release.
        line: line of the release.
        release: number of the release; None for the current one.

    Raises:
        StorageError: the release does not exist, or an ancestor is in another store that cannot be
            reached.
    """
    ancestors: list[Ancestor] = []
    states: dict[tuple[str, str], Mapping[str, ReleaseState]] = {}
    at: tuple[Store, str, Release] | None = (store, line, store.release(line, release))
    while at is not None:
        place, name, record = at
        if any(
            (step.store, step.line, step.state.release.id) == (place.url, name, record.id)
            for step in ancestors
        ):
            raise StorageError(
                "a release is its own ancestor",
                where=f"{place.url}, line {name}, release {record.name}",
            )
        if (place.url, name) not in states:
            states[place.url, name] = {state.release.id: state for state in place.releases(name)}
        line_states = states[place.url, name]
        tick = record.facts.get(TICK)
        story = read_tick(Ticks(place, name), tick) if isinstance(tick, str) else None
        before = _migrated_from(place, record)
        how: How = (
            "migrated"
            if before is not None
            else "retrained"
            if record.parent is not None
            else "frozen"
        )
        ancestors.append(Ancestor(place.url, name, line_states[record.id], story, how))
        at = before or (
            None if record.parent is None else (place, name, line_states[record.parent].release)
        )
    return tuple(ancestors)


def rollback(store: Store, line: str, *, to: str | int | None = None, reason: str = "") -> Pointer:
    """Make an earlier release current again, and mark the present one as rejected.

    Args:
        store: store of the line.
        line: name of the line.
        to: release to which to roll back; None for the last usable release that first became
            current before the present one did.
        reason: reason for the rollback. It is recorded with the rejected release, so that nobody
            promotes it by mistake.

    Raises:
        StorageError: there is no such release, or it is not usable any more.
        ConflictError: another release was made current meanwhile.
    """
    states = {state.release.id: state for state in store.releases(line)}
    history = store.history(line)
    if not history:
        raise StorageError("no release is current", where=f"{store.url}, line {line}")
    rejected = history[-1].release
    if to is None:
        order = list(dict.fromkeys(entry.release for entry in history))
        usable = [
            each
            for each in order[: order.index(rejected)]
            if states[each].status not in ("removed", "rejected")
        ]
        if not usable:
            raise StorageError(
                "there is no earlier release to roll back to",
                where=f"{store.url}, line {line}",
                got=f"release {shown(rejected)}",
            )
        target = shown(usable[-1])
    else:
        target = str(to)
    why = reason or f"release {shown(rejected)} was rolled back"
    pointer = store.promote(
        line,
        target,
        after=history[-1].id,
        reason=f"rolled back from release {shown(rejected)}: {why}",
    )
    if pointer.release != rejected:
        store.mark(line, shown(rejected), "rejected", why)
    return pointer


def metrics_of(tick: TickStory | None) -> dict[str, Any]:
    """Return a tick's evaluation by metric: the values of champion and challenger."""
    if tick is None or tick.evaluated is None:
        return {}
    champion, challenger = tick.evaluated.champion, tick.evaluated.challenger
    return {
        name: {"champion": champion.values.get(name), "challenger": challenger.values.get(name)}
        for name in ("loss", *challenger.metrics)
    }


def as_json(ancestors: Sequence[Ancestor]) -> list[dict[str, Any]]:
    """Return a lineage as JSON data."""
    entries = []
    for step in ancestors:
        release, tick = step.state.release, step.tick
        entry: dict[str, Any] = {
            "store": step.store,
            "line": step.line,
            "release": release.name,
            "status": step.state.status,
            "reason": step.state.reason,
            "how": step.how,
            "package": release.package,
            "program": release.program,
            "weights": release.weights,
            "created": release.created,
            "message": release.message,
            "facts": release.facts,
        }
        if tick is not None:
            entry["tick"] = {
                "name": tick.name,
                "begun": tick.begun,
                "failures": [failure.message for failure in tick.failures],
                "data": None if tick.taken is None else tick.taken.snapshot.model_dump(mode="json"),
                "versions": None if tick.pinned is None else tick.pinned.versions,
                "config": None if tick.pinned is None else tick.pinned.config,
                "trained": None if tick.trained is None else tick.trained.model_dump(mode="json"),
                "metrics": metrics_of(tick),
                "decided": None if tick.decided is None else tick.decided.model_dump(mode="json"),
                "outcome": None if tick.ended is None else tick.ended.outcome,
            }
        entries.append(entry)
    return entries


def _migrated_from(store: Store, release: Release) -> tuple[Store, str, Release] | None:
    """Return store, line and release from which a release's weights were migrated; None if they
    were not.
    """
    line, number, url = (release.facts.get(name) for name in (LINE, RELEASE, STORE))
    if not isinstance(line, str) or not isinstance(number, str):
        return None
    place = Store(url) if isinstance(url, str) and url != store.url else store
    return place, line, place.release(line, number)
