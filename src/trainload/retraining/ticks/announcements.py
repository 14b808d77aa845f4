"""Announcements of what happens to a line: to MLflow's model registry and to webhooks.

A webhook's deliveries are records in the store, so that no later tick repeats one:

    lines/LINE/webhooks/HOOK/tick-20261123T060000Z.json   the end of a tick was delivered
    .../current-00000007.json                             so was a manual promotion, or a rollback
    .../begun.json                                        events before the webhook have records

An event is delivered before its record is written, so it is repeated if the process is killed in
between, and by the next tick if it could not be delivered.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import TrainloadError
from trainload.core.records import Nonce, Sealed, Text, Time, now
from trainload.packaging.stores.releases import Line, Pointer, shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config, Webhook
from trainload.retraining.ticks.aftermath import in_words, record_of
from trainload.retraining.ticks.model_registry import register_current
from trainload.retraining.ticks.tick_records import Ended, Ticks, Trained
from trainload.retraining.ticks.webhooks import deliver

_LATEST = 16
"""Number of the latest ticks, and of the latest changes of the current release, that are delivered
if they were not."""
_BEGUN = "begun"
_BY_TICK = re.compile(r"tick [0-9]{8}T[0-9]{6}Z: ")
"""Beginning of the reason for a promotion by a tick, which is delivered as the end of that tick."""


class Delivery(Sealed):
    """The delivery of an event to a webhook.

    Attributes:
        event: id of the event, and name of the record's file.
        attempts: number of attempts that it took; 0 for an event before the webhook was configured,
            which is not delivered.
    """

    line: Line
    event: Text
    attempts: int
    created: Time
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class _Announcement:
    """An event of a line.

    Attributes:
        id: its id.
        kind: an outcome of a tick, or "rolled back".
        time: when it happened, as in records.
        data: JSON data about it.
    """

    id: str
    kind: str
    time: str
    data: dict[str, Any]


def announce(
    config: Config, store: Store, *, ended: Ended | None = None, pointer: Pointer | None = None
) -> tuple[str, ...]:
    """Bring MLflow's model registry up to date, and notify webhooks of all that they do not know.

    Args:
        config: configuration with the key mlflow or webhooks.
        store: store of its line.
        ended: the end of a tick, whose record is not written yet.
        pointer: entry of the history of `current` that was just written.

    Returns:
        The problems that occurred. Everything that was not done is done by the next tick.
    """
    problems: list[str] = []
    if config.mlflow is not None:
        try:
            register_current(config.mlflow, store, config.line)
        except TrainloadError as error:
            problems.append(in_words(error))
    if config.webhooks:
        if ended is not None:
            ended = ended.model_copy(update={"warnings": (*ended.warnings, *problems)})
        try:
            events = _latest(store, config.line, ended)
        except TrainloadError as error:
            return (*problems, in_words(error))
        new = {_tick_id(ended)} if ended is not None else set()
        new |= {_pointer_id(pointer)} if pointer is not None else set()

        def notify(hook: Webhook) -> str:
            try:
                _notify(hook, store, config.line, events, new)
            except TrainloadError as error:
                return in_words(error)
            return ""

        # one that does not respond delays no other
        with ThreadPoolExecutor(len(config.webhooks)) as pool:
            problems += filter(None, pool.map(notify, config.webhooks))
    return tuple(problems)


def _notify(
    hook: Webhook,
    store: Store,
    line: str,
    events: Sequence[_Announcement],
    new: Collection[str],
) -> None:
    """Deliver events to a webhook in their order, until one cannot be delivered.

    `new` are the ids of events that a webhook receives although it was not notified before.
    """
    folder = f"lines/{line}/webhooks/{sha256_bytes(hook.url.encode())[:16]}"
    known = set(store.files.names(folder))
    if f"{_BEGUN}.json" not in known:
        older = [event.id for event in events if event.id not in new]
        for each in (*older, _BEGUN):
            _write(store, line, folder, each, 0)
        known |= {f"{each}.json" for each in older}
    # many events at a slow server must not delay a tick: the next one continues
    until = time.monotonic() + hook.attempts * hook.timeout.total_seconds()
    for event in events:
        if time.monotonic() > until:
            return
        if event.kind not in hook.events or f"{event.id}.json" in known:
            continue
        message = {"type": event.kind, "timestamp": event.time, "data": event.data}
        attempts = deliver(hook, f"{line}-{event.id}", message)
        _write(store, line, folder, event.id, attempts)


def _write(store: Store, line: str, folder: str, event: str, attempts: int) -> None:
    record = Delivery(
        line=line, event=event, attempts=attempts, created=now(), nonce=secrets.token_hex(16)
    )
    store.files.create(f"{folder}/{event}.json", record.to_bytes())


def _latest(store: Store, line: str, ended: Ended | None) -> list[_Announcement]:
    """Return the latest events of a line, in their order."""
    ticks = Ticks(store, line)
    ends = [*ticks.of_all(Ended, ticks.names()[-_LATEST:]).values()]
    if ended is not None and ended.tick not in {each.tick for each in ends}:
        ends.append(ended)
    trained = ticks.of_all(Trained, [each.tick for each in ends if each.release is not None])
    events = [
        _Announcement(
            _tick_id(each),
            each.outcome,
            each.created,
            {
                "store": store.url,
                **record_of(each),
                "package": trained[each.tick].package if each.tick in trained else None,
            },
        )
        for each in ends
    ]
    return sorted([*events, *_manual(store, store.history(line))], key=lambda event: event.time)


def _manual(store: Store, history: Sequence[Pointer]) -> list[_Announcement]:
    """Return the latest changes of the current release that no tick made."""
    events: list[_Announcement] = []
    earlier: list[str] = []
    for entry in history:
        previous = earlier[-1] if earlier else None
        if entry.release != previous and not _BY_TICK.match(entry.reason):
            kind = "rolled back" if entry.release in earlier else "promoted"
            data = {
                "store": store.url,
                "line": entry.line,
                "release": shown(entry.release),
                "package": entry.package,
                "previous": None if previous is None else shown(previous),
                "reason": entry.reason,
            }
            events.append(_Announcement(_pointer_id(entry), kind, entry.created, data))
        earlier.append(entry.release)
    return events[-_LATEST:]


def _tick_id(ended: Ended) -> str:
    return f"tick-{ended.tick}"


def _pointer_id(pointer: Pointer) -> str:
    return f"current-{pointer.id}"
