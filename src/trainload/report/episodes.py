"""A run's attempts, as its journal tells of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainload.launching.run.journal import Event
from trainload.report.history import History

Outcome = Literal["ended", "failed", "stopped", "moved", "broke off", "going on"]
BROKE_OFF = "the journal ends abruptly: the driver of the run, or its only worker, was killed"
_CLOSING: dict[str, Outcome] = {"failure": "failed", "failed": "failed", "end": "ended", "stopped": "stopped"}
_LEAVING = ("end", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Workers from their start to their end. All times are in seconds since 1970.

    Attributes:
        prepared: when weights, data and compilation for it began.
        started: when its workers came to their first step.
        ended: when they ended, or were last heard of.
        away: when the run's driver was gone after it, (from, to), until another one prepared the next attempt; None where it stayed.
        step, done: steps of the run that were done before it, and after it.
        world, strategy: its ranks, and its plan's.
        nodes: theirs, by rank.
        outcome: moved: to other nodes, or another number of ranks. broke off: nobody has said why it ended.
        first, last: where its steps stand among all, [first, last).
        events: all of it that are no steps, until the next one starts.
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
    """The attempts of a run, in order. going_on: whether somebody drives it now."""
    return tuple(_attempts(history, going_on))


def _attempts(history: History, going_on: bool) -> Iterator[Attempt]:
    before, *segments = _segments(history.others)
    prepared = _first_of(before)
    for index, segment in enumerate(segments):
        start, *events = segment
        first, last = (int(place) for place in np.searchsorted(history.steps.attempt, [index, index + 1]))
        closing = next((event for event in events if event.kind in _CLOSING), None)
        leaving = next((event for event in reversed(events) if event.kind in _LEAVING), None)
        here = going_on and index == len(segments) - 1
        heard = max([start.time, *history.steps.time[first:last][-1:], *(each.time for each in events if _is_of_workers(each))])
        outcome = _CLOSING[closing.kind] if closing is not None else _left(events, going_on=here)
        ended = closing.time if closing is not None else (history.last or heard) if here else heard
        gone = leaving.time if leaving is not None else ended if outcome == "broke off" else None
        following = segments[index + 1][0].time if index + 1 < len(segments) else None
        away = None
        if gone is not None and following is not None:
            back = _first_of([event for event in events if event.time > gone])
            away = (gone, max(gone, following if back is None else back))
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
    """What came before the first start, and each start with what came after it."""
    found: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "start":
            found.append([])
        found[-1].append(event)
    return found


def _first_of(events: Sequence[Event]) -> float | None:
    """When these began: that of a stage is told when it is over."""
    return min((event.time - (event.data.get("seconds", 0.0) if event.kind == "stage" else 0.0) for event in events), default=None)


def _is_of_workers(event: Event) -> bool:
    """Whether workers in their loop have said it."""
    return event.kind in ("eval", "checkpoint") or (event.kind == "stage" and event.data["name"] == "checkpoint")


def _left(events: Sequence[Event], *, going_on: bool) -> Outcome:
    """How an attempt ended of which nobody says that it did."""
    if going_on:
        return "going on"
    return "moved" if any(event.kind in ("resize", "preemption") for event in events) else "broke off"
