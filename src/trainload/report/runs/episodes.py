"""Attempts of a run, reconstructed from its journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainload.launching.run.journal import Event
from trainload.report.runs.history import History

Outcome = Literal["ended", "failed", "stopped", "moved", "broke off", "going on"]
BROKE_OFF = "the journal ends abruptly: the driver of the run, or its only worker, was killed"
_CLOSING: dict[str, Outcome] = {
    "failure": "failed",
    "failed": "failed",
    "end": "ended",
    "stopped": "stopped",
}
_LEAVING = ("end", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of a run. All times are in seconds since 1970.

    Attributes:
        prepared: start of its preparation (weights, data, compilation).
        started: time when its workers reached their first step.
        ended: end of the workers, or their last message.
        away: (from, to): time without a driver after the attempt, until another driver prepared the
            next one; None if there was none.
        step: completed steps of the run before it.
        done: completed steps of the run after it.
        world: number of ranks.
        strategy: strategy of its plan.
        nodes: nodes by rank.
        outcome: "moved": to other nodes, or another number of ranks; "broke off": it ended without
            a final event.
        first: index of its first step among all step events.
        last: index after its last step.
        events: its events other than steps, until the next attempt starts.
    """

    prepared: float
    started: float
    ended: float
    away: tuple[float, float] | None
    step: int
    done: int
    world: int
    strategy: str
    nodes: tuple[str, ...]
    outcome: Outcome
    first: int
    last: int
    events: tuple[Event, ...]


def attempts_of(history: History, *, going_on: bool) -> tuple[Attempt, ...]:
    """Return the attempts of a run, in order. `going_on` is True if the run has a driver now."""
    return tuple(_attempts(history, going_on))


def _attempts(history: History, going_on: bool) -> Iterator[Attempt]:
    before, *segments = _segments(history.others)
    prepared = _first_of(before)
    for index, segment in enumerate(segments):
        start, *events = segment
        first, last = (
            int(place) for place in np.searchsorted(history.steps.attempt, [index, index + 1])
        )
        closing = next((event for event in events if event.kind in _CLOSING), None)
        leaving = next((event for event in reversed(events) if event.kind in _LEAVING), None)
        is_running = going_on and index == len(segments) - 1
        heard = max(
            [
                start.time,
                *history.steps.time[first:last][-1:],
                *(each.time for each in events if _is_of_workers(each)),
            ]
        )
        outcome = (
            _CLOSING[closing.kind]
            if closing is not None
            else _open_outcome(events, going_on=is_running)
        )
        ended = (
            closing.time
            if closing is not None
            else (history.last or heard)
            if is_running
            else heard
        )
        driver_ended = (
            leaving.time if leaving is not None else ended if outcome == "broke off" else None
        )
        following = segments[index + 1][0].time if index + 1 < len(segments) else None
        away = None
        if driver_ended is not None and following is not None:
            back = _first_of([event for event in events if event.time > driver_ended])
            away = (driver_ended, max(driver_ended, following if back is None else back))
        data = start.data
        yield Attempt(
            prepared=start.time if prepared is None else prepared,
            started=start.time,
            ended=ended,
            away=away,
            step=data["step"],
            done=int(history.steps.number[last - 1]) + 1 if last > first else data["step"],
            world=data["world"],
            strategy=data["strategy"],
            nodes=tuple(map(str, data.get("nodes", ()))),
            outcome=outcome,
            first=first,
            last=last,
            events=tuple(segment),
        )
        prepared = ended if away is None else away[1]


def _segments(events: Sequence[Event]) -> list[list[Event]]:
    """Split events into those before the first start, and each start with the events after it."""
    segments: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "start":
            segments.append([])
        segments[-1].append(event)
    return segments


def _first_of(events: Sequence[Event]) -> float | None:
    """Return the earliest beginning of events; that of a stage is before its event, which is
    written at its end.
    """
    return min(
        (
            event.time - (event.data.get("seconds", 0.0) if event.kind == "stage" else 0.0)
            for event in events
        ),
        default=None,
    )


def _is_of_workers(event: Event) -> bool:
    """Return True if an event is from workers in their training loop."""
    return event.kind in ("eval", "checkpoint") or (
        event.kind == "stage" and event.data["name"] == "checkpoint"
    )


def _open_outcome(events: Sequence[Event], *, going_on: bool) -> Outcome:
    """Return the outcome of an attempt without a closing event."""
    if going_on:
        return "going on"
    return (
        "moved" if any(event.kind in ("resize", "preemption") for event in events) else "broke off"
    )
