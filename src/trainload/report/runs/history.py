"""A run's journal in memory: steps as numeric columns, which are compact even for long runs, and
all other events.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainload.launching.run.journal import Event
from trainload.launching.run.run_state import Summary

Numbers = NDArray[np.float64]
Whole = NDArray[np.int64]

_COLUMNS = (
    "loss",
    "gradient_norm",
    "seconds",
    "data_wait",
    "tokens_per_second",
    "rows_per_second",
    "mfu",
    "memory",
    "loss_scale",
)
"""Numbers of step events."""


@dataclass(frozen=True, slots=True)
class Steps:
    """All step events, in the order of the journal, as arrays of the same length.

    A missing number is NaN; a non-finite number is infinite.

    Attributes:
        number: number of the step, from 0.
        attempt: number of the attempt, from 0; -1 before the first start.
        time: seconds since 1970.
        columns: name -> numbers.
        metrics: the job's own metrics, name -> numbers; those of several graphs as "graph.loss".
    """

    number: Whole
    attempt: Whole
    time: Numbers
    columns: Mapping[str, Numbers]
    metrics: Mapping[str, Numbers]

    @property
    def done(self) -> Numbers:
        """Number of completed steps after each step."""
        return self.number.astype(np.float64) + 1.0

    def kept(self) -> Whole:
        """Return the indices of the last occurrence of each step, ordered by step."""
        _, last_indices = np.unique(self.number[::-1], return_index=True)
        return (len(self.number) - 1 - last_indices).astype(np.int64)

    def discarded(self) -> list[Whole]:
        """Return the indices of steps that were repeated later, as runs of consecutive steps of one
        attempt.
        """
        repeated = np.ones(len(self.number), dtype=bool)
        repeated[self.kept()] = False
        places = np.flatnonzero(repeated)
        if not len(places):
            return []
        breaks = (np.diff(places) != 1) | (np.diff(self.attempt[places]) != 0)
        return [each.astype(np.int64) for each in np.split(places, np.flatnonzero(breaks) + 1)]


@dataclass(frozen=True, slots=True)
class History:
    """Events of a run.

    Attributes:
        summary: summary of all events.
        steps: step events.
        others: all other events; of statistics, each graph's last ones.
        first: time of the first event; None if there is none.
        last: time of the last event; None if there is none.
    """

    summary: Summary
    steps: Steps
    others: tuple[Event, ...]
    first: float | None
    last: float | None

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds, in order."""
        return [event for event in self.others if event.kind in kinds]


def read_history(events: Iterable[Event]) -> History:
    """Read events in one pass. Only numbers of steps are kept."""
    summary = Summary()
    number, attempt = array("q"), array("q")
    time, columns = array("d"), {name: array("d") for name in _COLUMNS}
    metrics: dict[str, tuple[array[int], array[float]]] = defaultdict(
        lambda: (array("q"), array("d"))
    )
    others: list[Event] = []
    sampled: dict[str, Event] = {}
    starts = 0
    first: float | None = None
    last: float | None = None
    for event in events:
        summary.take(event)
        first, last = event.time if first is None else first, event.time
        if event.kind == "statistics":
            sampled[event.data.get("graph", "")] = event
            continue
        if event.kind != "step":
            starts += event.kind == "start"
            others.append(event)
            continue
        data = event.data
        for name, column in columns.items():
            column.append(_number(data.get(name)))
        for name, value in data["metrics"].items():
            places, values = metrics[name]
            places.append(len(number))
            values.append(_number(value))
        number.append(data["step"])
        attempt.append(starts - 1)
        time.append(event.time)
    steps = Steps(
        number=np.array(number, dtype=np.int64),
        attempt=np.array(attempt, dtype=np.int64),
        time=np.array(time, dtype=np.float64),
        columns={name: np.array(column, dtype=np.float64) for name, column in columns.items()},
        metrics={name: _spread(*pairs, len(number)) for name, pairs in metrics.items()},
    )
    return History(summary, steps, (*others, *sampled.values()), first, last)


def _number(value: float | None) -> float:
    if value is None:
        return math.nan
    return value if math.isfinite(value) else math.inf


def _spread(places: array[int], values: array[float], count: int) -> Numbers:
    spread = np.full(count, np.nan)
    spread[np.array(places, dtype=np.int64)] = np.array(values, dtype=np.float64)
    return spread
