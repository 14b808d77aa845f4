"""The timeline of a run's events over wall-clock time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainload.report.frame.figures import MARKS
from trainload.report.frame.svg import drawing, shade, svg_of
from trainload.report.frame.words import count, hour, moment, sanitize, span
from trainload.report.runs.episodes import Attempt, Outcome
from trainload.report.runs.failures import Failure, waits_of
from trainload.report.runs.history import History

_LANE = 0.34
"""Height of a lane in inches."""
_LONG_ABSENCE, _SHORTENED_ABSENCE = 0.15, 0.05
"""Time without a driver that is longer than the first fraction of the other time is drawn with the
second fraction as its length.
"""
_STEPS = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
    172800,
    604800,
)
"""Possible distances of axis ticks in seconds."""
_MARKS = 300
"""Resolution of a lane: marks that are closer are merged.

It is also the maximum number of attempts that are drawn (the last ones).
"""
ENDS: Mapping[Outcome, str] = {
    "ended": "good",
    "going on": "train",
    "moved": "warning",
    "stopped": "idle",
    "failed": "failure",
    "broke off": "failure",
}
OUTCOMES: Mapping[Outcome, str] = {
    "ended": "finished",
    "going on": "running",
    "moved": "moved to other nodes",
    "stopped": "stopped on request",
    "failed": "failed",
    "broke off": "ended abruptly",
}
_TITLE = 200


@dataclass(frozen=True, slots=True)
class _Bar:
    since: float
    until: float
    shade: str
    title: str
    faint: bool = False
    cap: bool = False


@dataclass(frozen=True, slots=True)
class _Mark:
    time: float
    title: str


@dataclass(frozen=True, slots=True)
class _Lane:
    name: str
    bars: Sequence[_Bar] = ()
    marks: Sequence[_Mark] = ()
    marker: str = "|"
    shade: str = "ink"


def timeline_of(
    history: History,
    attempts: Sequence[Attempt],
    failures: Sequence[Failure],
    name: str,
    width: float,
    *,
    label: bool = True,
) -> str | None:
    """Return the timeline as SVG, `width` inches wide; None if there are no events.

    `name` is unique in the page.
    """
    if history.first is None or history.last is None:
        return None
    lanes = [lane for lane in _lanes(history, attempts, failures) if lane.bars or lane.marks]
    clock = _Clock(
        history.first,
        max(history.last, history.first + 1.0),
        [each.away for each in attempts if each.away is not None],
    )
    titles: dict[str, str] = {}
    with drawing():
        figure = Figure(figsize=(width, _LANE * len(lanes) + 0.45), layout="constrained")
        axes = figure.add_subplot()
        for row, lane in enumerate(lanes):
            _draw(axes, lane, row, clock, titles, name)
        for since, until in clock.cut:
            middle = (clock.place(since) + clock.place(until)) / 2
            axes.axvspan(
                clock.place(since),
                clock.place(until),
                color=shade("grid"),
                alpha=0.6,
                linewidth=0,
                zorder=0,
            )
            axes.text(
                middle,
                -0.75,
                span(until - since),
                ha="center",
                va="bottom",
                fontsize=9,
                color=shade("muted"),
            )
        axes.set_xlim(0.0, clock.length)
        axes.set_ylim(len(lanes) - 0.5, -0.75 if clock.cut else -0.5)
        axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        ticks = clock.ticks(5 if width < 6 else 9)
        axes.set_xticks([clock.place(tick) for tick in ticks], clock.words(ticks))
        description = f"What happened from {moment(history.first)} to {moment(history.last)}"
        return svg_of(figure, name, description, titles)


class _Clock:
    """Scale of the time axis. Long times without a driver are shortened."""

    def __init__(self, first: float, last: float, away: Sequence[tuple[float, float]]) -> None:
        driven_seconds = max(1.0, last - first - sum(until - since for since, until in away))
        self.cut = [
            (since, until)
            for since, until in away
            if until - since > _LONG_ABSENCE * driven_seconds
        ]
        edges = [first, *(edge for gap in self.cut for edge in gap), last]
        lengths = np.maximum(np.diff(edges), 0.0)
        lengths[1::2] = _SHORTENED_ABSENCE * driven_seconds
        self._times = np.array(edges)
        self._places = np.concatenate([[0.0], np.cumsum(lengths)])
        self.length = float(self._places[-1])

    def place(self, time: float) -> float:
        """Return the position of a time on the axis."""
        return float(np.interp(time, self._times, self._places))

    def ticks(self, most: int) -> list[float]:
        """Return about `most` axis ticks at round times, outside of shortened times; for a short
        run, its beginning and end.
        """
        steps = [step for step in _STEPS if self.length / step <= most] or [
            math.ceil(self.length / most / 604800) * 604800
        ]
        times: list[float] = []
        for since, until in zip(self._times[::2], self._times[1::2], strict=True):
            first = math.ceil(since / steps[0]) * steps[0]
            times += [float(tick) for tick in np.arange(first, until, steps[0])]
        return times if len(times) > 1 else [float(self._times[0]), float(self._times[-1])]

    def words(self, ticks: Sequence[float]) -> list[str]:
        """Return the labels of ticks, with the day if there are several days."""
        days = {int(tick // 86400) for tick in ticks}
        exact = any(round(tick) % 60 for tick in ticks)
        texts = [hour(tick) if exact else hour(tick)[:5] for tick in ticks]
        if len(days) == 1:
            return texts
        before = [None, *(int(tick // 86400) for tick in ticks[:-1])]
        return [
            f"{text}\n{moment(tick)[5:10]}" if int(tick // 86400) != day else text
            for text, tick, day in zip(texts, ticks, before, strict=True)
        ]


def _lanes(
    history: History, attempts: Sequence[Attempt], failures: Sequence[Failure]
) -> list[_Lane]:
    bars: list[_Bar] = []
    for number, attempt in list(enumerate(attempts, 1))[-_MARKS:]:
        bars.append(
            _Bar(
                attempt.prepared,
                attempt.started,
                "idle",
                f"attempt {number} is prepared, {span(attempt.started - attempt.prepared)}",
                True,
            )
        )
        description = (
            f"steps {attempt.step} to {attempt.done}, {attempt.world} ranks, {attempt.outcome}"
        )
        bars.append(
            _Bar(attempt.started, attempt.ended, "train", f"attempt {number}: {description}")
        )
        bars.append(
            _Bar(
                attempt.ended,
                attempt.ended,
                ENDS[attempt.outcome],
                f"attempt {number} {OUTCOMES[attempt.outcome]}",
                cap=True,
            )
        )
    waits = [
        _Bar(since, until, "warning", f"waited for {span(until - since)}")
        for since, until in waits_of(history)
    ]
    evaluations = [
        _Bar(
            event.time - event.data["seconds"],
            event.time,
            "evaluation",
            f"evaluation at step {event.data['step']}: {count(event.data['loss'])}",
        )
        for event in history.of("eval")
    ]
    return [
        _Lane("attempts", bars),
        _Lane(
            "failures",
            marks=[_Mark(each.time, f"{each.what}: {each.message}") for each in failures],
            marker="X",
            shade="failure",
        ),
        _Lane("preempted", marks=_event_marks(history, "preemption"), marker="v", shade="warning"),
        _Lane("resized", marks=_event_marks(history, "resize"), marker="D", shade="ink"),
        _Lane("waiting", waits),
        _Lane("warnings", marks=_event_marks(history, "warning"), marker="^", shade="warning"),
        _Lane("evaluations", _merge_close_bars(evaluations, history)),
        _Lane(
            "checkpoints",
            marks=[
                _Mark(each.time, f"checkpoint of step {each.data['step']}")
                for each in history.of("checkpoint")
            ],
            shade="good",
        ),
    ]


def _event_marks(history: History, kind: str) -> list[_Mark]:
    return [_Mark(event.time, str(event.data["message"])) for event in history.of(kind)]


def _merge_close_bars(bars: Sequence[_Bar], history: History) -> list[_Bar]:
    """Merge bars of a lane that are too close to be distinguished."""
    assert history.first is not None and history.last is not None
    least = (history.last - history.first) / _MARKS
    merged: list[_Bar] = []
    numbers: list[int] = []
    for bar in bars:
        if merged and bar.since - merged[-1].since < least:
            numbers[-1] += 1
            merged[-1] = _Bar(
                merged[-1].since,
                bar.until,
                bar.shade,
                f"{numbers[-1]} of them, the last: {bar.title}",
            )
        else:
            merged.append(bar)
            numbers.append(1)
    return merged


def _draw(
    axes: Axes, lane: _Lane, row: int, clock: _Clock, titles: dict[str, str], name: str
) -> None:
    for number, bar in enumerate(lane.bars):
        since, until = clock.place(bar.since), clock.place(bar.until)
        width = clock.length / 120 if bar.cap else max(until - since, clock.length / 300)
        since = max(0.0, since - width) if bar.cap else since
        (artist,) = axes.barh(
            row,
            width,
            left=since,
            height=0.56,
            **MARKS["prepared" if bar.faint else f"{bar.shade} bar"].fill,
            zorder=3,
        )
        _set_tooltip(artist, titles, f"{name}-{row}-{number}", bar.title, bar.since)
    places = sorted((clock.place(mark.time), number) for number, mark in enumerate(lane.marks))
    together: list[tuple[float, list[int]]] = []
    for place, number in places:
        if together and place - together[-1][0] < clock.length / _MARKS:
            together[-1][1].append(number)
        else:
            together.append((place, [number]))
    for place, numbers in together:
        (artist,) = axes.plot(
            [place],
            [row],
            lane.marker,
            color=shade(lane.shade),
            markersize=8,
            markeredgewidth=1.6 if lane.marker == "|" else 0,
            zorder=4,
        )
        more = f"{len(numbers)} of them, the last: " if len(numbers) > 1 else ""
        mark = lane.marks[numbers[-1]]
        _set_tooltip(artist, titles, f"{name}-{row}-m{numbers[0]}", more + mark.title, mark.time)


def _set_tooltip(artist: object, titles: dict[str, str], gid: str, title: str, time: float) -> None:
    artist.set_gid(gid)  # type: ignore[attr-defined]
    titles[gid] = f"{hour(time)}  {sanitize(title, _TITLE)}"
