"""Charts of a run's numbers over its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    Formatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from trainload.report.frame.figures import CHART_SIZE, MARKS, Chart
from trainload.report.frame.svg import drawing, svg_of
from trainload.report.frame.words import count, percent
from trainload.report.runs.history import History, Numbers
from trainload.report.runs.thinning import Line, thin

_LOG_BEYOND = 20.0
"""Ratio of large to small numbers, without outliers, above which a logarithmic scale is used."""
_MOST_STRETCHES = 60
_MOST_METRICS = 12
_MOST_MARKS = 400
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


@dataclass(frozen=True, slots=True)
class _Curve:
    """Contents of a chart.

    Attributes:
        name: name that is unique in the page.
        title: title of the chart.
        numbers: a number for each step event.
        evaluated: (step, number) of evaluations.
        log: True to use a logarithmic scale if the range of the numbers is large.
        share: True for fractions of 1, which are displayed in percent.
        from_zero: True to begin the scale at 0.
        marks: True to mark checkpoints.
    """

    name: str
    title: str
    numbers: Numbers
    evaluated: Sequence[tuple[int, float]] = ()
    log: bool = False
    share: bool = False
    from_zero: bool = False
    marks: bool = False

    def words(self, value: float) -> str:
        return percent(value) if self.share else count(value)


def charts_of(history: History) -> list[Chart]:
    """Return all charts for which the run has numbers."""
    with drawing():
        return [
            chart for curve in _curves(history) if (chart := _chart(curve, history)) is not None
        ]


def _curves(history: History) -> Iterable[_Curve]:
    columns = history.steps.columns
    evaluations = {int(event.data["step"]): event.data for event in history.of("eval")}
    losses = [(step, float(data["loss"])) for step, data in sorted(evaluations.items())]
    yield _Curve("loss", "Loss", columns["loss"], evaluated=losses, log=True, marks=True)
    yield _Curve("norm", "Gradient norm", columns["gradient_norm"], log=True)
    unit = "tokens" if np.isfinite(columns["tokens_per_second"]).any() else "rows"
    yield _Curve("rate", f"Throughput, {unit}/s", columns[f"{unit}_per_second"], from_zero=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip(columns["data_wait"] / np.maximum(columns["seconds"], 1e-9), 0.0, 1.0)
    yield _Curve("wait", "Waiting for data, share of a step", share, share=True, from_zero=True)
    yield _Curve(
        "memory", "Memory, maximum over ranks, GiB", columns["memory"] / 2**30, from_zero=True
    )
    yield _Curve("mfu", "Model FLOP/s utilisation", columns["mfu"], share=True, from_zero=True)
    yield _Curve("scale", "Loss scale", columns["loss_scale"], log=True)
    names = sorted(
        {
            *history.steps.metrics,
            *(name for data in evaluations.values() for name in data["metrics"]),
        }
    )
    for number, name in enumerate(names[:_MOST_METRICS]):
        numbers = history.steps.metrics.get(name, np.full(len(history.steps.number), np.nan))
        evaluated = [
            (step, float(data["metrics"][name]))
            for step, data in sorted(evaluations.items())
            if name in data["metrics"]
        ]
        yield _Curve(f"metric{number}", name, numbers, evaluated=evaluated)


def _chart(curve: _Curve, history: History) -> Chart | None:
    steps = history.steps
    indices = steps.kept()
    line = thin(steps.done[indices], curve.numbers[indices])
    evaluated = [(float(step), value) for step, value in curve.evaluated if np.isfinite(value)]
    if line is None and not evaluated:
        return None
    figure = Figure(figsize=CHART_SIZE, layout="constrained")
    axes = figure.add_subplot()
    legend: list[tuple[str, str]] = []
    stretches = [
        (steps.done[each], curve.numbers[each]) for each in steps.discarded()[-_MOST_STRETCHES:]
    ]
    if _draw_discarded(axes, stretches):
        legend.append(("again", "repeated later"))
    if line is not None:
        legend = [
            (_draw_line(axes, line), "training" if curve.evaluated else "each step"),
            *([("band", "minimum to maximum")] if line.thinned else []),
            *legend,
        ]
    if evaluated:
        x, y = np.array(_select_points(evaluated)).T
        axes.plot(x, y, **MARKS["evaluation"].style, zorder=4)
        legend.append(("evaluation", "evaluation"))
    log = curve.log and _is_wide(line, evaluated)
    _scale(axes, curve, log)
    if _draw_restarts(axes, history):
        legend.append(("restart", "restart"))
    if curve.marks and _draw_checkpoints(axes, history):
        legend.append(("checkpoint", "checkpoint"))
    if line is not None and len(line.broken):
        axes.plot(
            line.broken,
            np.ones(len(line.broken)),
            **MARKS["broken"].style,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
        legend.append(("broken", "not a finite number"))
    notes = ["log scale"] if log else []
    if line is not None and line.thinned:
        notes.append("mean, minimum and maximum of several steps each")
    return Chart(
        curve.name,
        curve.title,
        svg_of(figure, curve.name, _label(curve, line), {}),
        tuple(legend),
        ", ".join(notes),
    )


def _draw_line(axes: Axes, line: Line) -> str:
    """Draw a line, with a band if it was thinned; return the kind of its mark."""
    if line.thinned:
        axes.fill_between(line.x, line.low, line.high, **MARKS["band"].fill, zorder=2)
    kind = "lone" if len(line.x) == 1 else "train"
    axes.plot(line.x, line.mean, **MARKS[kind].style, zorder=3)
    return kind


def _draw_discarded(axes: Axes, stretches: Sequence[tuple[Numbers, Numbers]]) -> bool:
    """Draw the earlier numbers of repeated steps as a broad, light line under the other; return
    True if there are any.
    """
    any_drawn = False
    for x, y in stretches:
        line = thin(x, y, 60)
        if line is not None:
            # a single number is a line of no length, whose ends are round
            twice = np.repeat(line.x, 2), np.repeat(line.mean, 2)
            x, mean = twice if len(line.x) == 1 else (line.x, line.mean)
            axes.plot(x, mean, **MARKS["again"].style, zorder=1)
            any_drawn = True
    return any_drawn


def _draw_restarts(axes: Axes, history: History) -> bool:
    """Mark the steps from which the run was resumed after restarts; return True if there are
    any.
    """
    restart_steps = [float(event.data["step"]) for event in history.of("start")[1:]]
    for step in sorted(set(restart_steps))[-_MOST_STRETCHES:]:
        axes.axvline(step, **MARKS["restart"].style, zorder=1.5)
    return bool(restart_steps)


def _draw_checkpoints(axes: Axes, history: History) -> bool:
    points = [(float(event.data["step"]), 0.0) for event in history.of("checkpoint")]
    if points:
        x = np.array(_select_points(points)).T[0]
        axes.plot(
            x,
            np.zeros(len(x)),
            **MARKS["checkpoint"].style,
            transform=axes.get_xaxis_transform(),
        )
    return bool(points)


def _select_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Select at most _MOST_MARKS points, evenly, including the first and the last."""
    if len(points) <= _MOST_MARKS:
        return list(points)
    return [points[int(place)] for place in np.linspace(0, len(points) - 1, _MOST_MARKS)]


def _is_wide(line: Line | None, evaluated: Sequence[tuple[float, float]]) -> bool:
    """Return True if all numbers are positive, and most of them span a large range (outliers are
    ignored).
    """
    values = np.array([value for _, value in evaluated], dtype=np.float64)
    low, high = (
        (values, values)
        if line is None
        else (np.append(line.low, values), np.append(line.high, values))
    )
    least = np.nanmin(low) if np.isfinite(low).any() else 0.0
    return bool(least > 0 and np.nanpercentile(high, 98) > _LOG_BEYOND * np.nanpercentile(low, 2))


def _scale(axes: Axes, curve: _Curve, log: bool) -> None:
    axes.margins(x=0.015)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(
            LogLocator(10, subs=(1.0, 2.0, 5.0) if _decades(axes) < 3 else (1.0,))
        )
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if curve.from_zero:
            high = axes.get_ylim()[1]
            axes.set_ylim(0.0, high if high > 0 else 1.0)
    axes.yaxis.set_major_formatter(
        _Words(100.0 if curve.share else 1.0, "%" if curve.share else "")
    )


class _Words(Formatter):
    """A formatter with as many digits as are needed to distinguish an axis's ticks."""

    def __init__(self, scale: float, unit: str) -> None:
        self._scale, self._unit = scale, unit

    def __call__(self, value: float, pos: int | None = None) -> str:
        """Return the label of a tick."""
        assert isinstance(self.axis, Axis)
        places = self.axis.get_majorticklocs() * self._scale
        if self.axis.get_scale() == "log" or not len(places):
            return count(value * self._scale) + self._unit
        size, unit = next(
            ((size, unit) for size, unit in _UNITS if np.abs(places).max() >= size), (1.0, "")
        )
        size = 1e3 if unit == "k" else size
        digits = next(
            (
                digits
                for digits in range(6)
                if np.allclose(places / size, np.round(places / size, digits), atol=1e-9, rtol=0)
            ),
            6,
        )
        scaled = value * self._scale / size
        return f"{scaled:,.{digits}f}{unit if scaled else ''}{self._unit}"


def _decades(axes: Axes) -> float:
    low, high = axes.get_ylim()
    return float(np.log10(high / low)) if low > 0 else 0.0


def _label(curve: _Curve, line: Line | None) -> str:
    """Describe a curve in words."""
    if line is None or not np.isfinite(line.mean).any():
        return f"{curve.title} by step"
    means = line.mean[np.isfinite(line.mean)]
    least, most = float(np.nanmin(line.low)), float(np.nanmax(line.high))
    last = f"from {curve.words(float(means[0]))} to {curve.words(float(means[-1]))}"
    return (
        f"{curve.title} by step: {last}, minimum {curve.words(least)}, maximum {curve.words(most)}"
    )
