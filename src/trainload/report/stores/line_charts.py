"""Charts of a line's metrics over its ticks: champions and challengers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure

from trainload.report.frame.figures import CHART_SIZE, MARKS, Chart
from trainload.report.frame.svg import drawing, svg_of
from trainload.retraining.ticks.lineage import TickStory, metrics_of
from trainload.retraining.ticks.tick_records import time_of

_MOST_METRICS = 12
_UNDECIDED = "undecided"
_LEGEND = {
    "promoted": "challenger, promoted",
    "rejected": "challenger, rejected",
    "conflict": "challenger, conflict",
    _UNDECIDED: "challenger, other outcomes",
}


def charts_of(ticks: Sequence[TickStory], name: str) -> list[Chart]:
    """Return charts of the loss, of each metric and of drift.

    `name` is the prefix of their names in the page.
    """
    judged = [tick for tick in ticks if tick.evaluated is not None]
    names = list(dict.fromkeys(metric for tick in judged for metric in metrics_of(tick)))[
        : 1 + _MOST_METRICS
    ]
    charts = [_metric(judged, metric, f"{name}-{number}") for number, metric in enumerate(names)]
    drift = _drift(judged, f"{name}-drift")
    return [*charts, *([drift] if drift is not None else [])]


def _metric(ticks: Sequence[TickStory], metric: str, name: str) -> Chart:
    values = [(tick, metrics_of(tick).get(metric, {})) for tick in ticks]
    titles: dict[str, str] = {}
    with drawing():
        figure = Figure(figsize=CHART_SIZE, layout="constrained")
        axes = figure.add_subplot()
        champion = [(_day(tick), _number(both.get("champion"))) for tick, both in values]
        axes.plot(
            [at for at, _ in champion],
            [value for _, value in champion],
            **MARKS["champion"].style,
        )
        present: set[str] = set()
        for number, (tick, both) in enumerate(values):
            value = _number(both.get("challenger"))
            outcome = tick.ended.outcome if tick.ended is not None else "under way"
            kind = outcome if outcome in _LEGEND else _UNDECIDED
            if math.isfinite(value):
                present.add(kind)
                (artist,) = axes.plot([_day(tick)], [value], **MARKS[kind].style)
                artist.set_gid(f"{name}-tick-{number}")
                titles[f"{name}-tick-{number}"] = f"{tick.name}: {outcome}, {value:.6g}"
        _time_axis(axes)
        svg = svg_of(figure, name, f"{metric} of champion and challenger over ticks", titles)
    title = "evaluation loss" if metric == "loss" else metric
    legend = [
        ("champion", "champion"),
        *((kind, words) for kind, words in _LEGEND.items() if kind in present),
    ]
    return Chart(name, title, svg, tuple(legend), "on the same held-out rows")


def _drift(ticks: Sequence[TickStory], name: str) -> Chart | None:
    """Return a chart of each tick's greatest drift of a column; None if there is no drift to
    show.
    """
    points = [
        (_day(tick), max(tick.decided.drift.values()))
        for tick in ticks
        if tick.decided is not None and tick.decided.drift
    ]
    if not points:
        return None
    with drawing():
        figure = Figure(figsize=CHART_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.plot(
            [at for at, _ in points],
            [value for _, value in points],
            **MARKS["drift"].style,
        )
        axes.set_ylim(0.0, 1.1 * max(max(value for _, value in points), 1e-9))
        _time_axis(axes)
        svg = svg_of(figure, name, "drift over ticks", {})
    return Chart(
        name=name,
        title="drift",
        svg=svg,
        legend=(("drift", "of the column that drifted most"),),
        note="stability index",
    )


def _time_axis(axes: Any) -> None:
    locator: Any = AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]  # matplotlib's dates have no types
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]  # as above


def _day(tick: TickStory) -> float:
    """Return a tick's time as a matplotlib date."""
    day: float = date2num(time_of(tick.name))  # type: ignore[no-untyped-call]  # matplotlib's dates have no types
    return day


def _number(value: float | None) -> float:
    return math.nan if value is None else value
