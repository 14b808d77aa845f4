"""Memory of a rank over an update, as stacked areas by kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainload.core.formatting import interval, size
from trainload.report.frame.figures import CHART_SIZE, MARKS, Chart
from trainload.report.frame.svg import drawing, shade, svg_of
from trainload.sharding.planner.step_memory import Call, Held, Kind, RankStep

AREAS = {
    Kind.PARAMETERS: ("train area", "parameters"),
    Kind.OPTIMIZER: ("good area", "optimizer state"),
    Kind.GRADIENTS: ("evaluation area", "gradients"),
    Kind.ACTIVATIONS: ("violet area", "activations"),
    Kind.GATHERED: ("teal area", "gathered parameters"),
    Kind.OTHER: ("idle area", "other"),
}
"""Kind of memory -> its mark and its name."""
_POINTS = 300
_NEAR = 0.4
"""The device's memory is drawn if the peak is at least this part of it."""
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def memory_chart(step: RankStep, available: int | None, title: str) -> Chart:
    """Return the chart of a rank.

    Args:
        step: the rank's update.
        available: memory of the device in bytes; None if unknown.
        title: title of the chart.
    """
    x, held = _points(step.calls)
    timed = step.calls[0].line is not None
    peak = sum(step.peak)
    scale, unit = _unit(peak)
    tensors = None if available is None else available - step.reserved
    shown = [kind for kind in Kind if held[:, kind].any()]
    legend = [AREAS[kind] for kind in reversed(shown)]
    with drawing():
        figure = Figure(figsize=CHART_SIZE, layout="constrained")
        axes = figure.add_subplot()
        below = np.zeros(len(x))
        for kind in shown:
            above = below + held[:, kind] / scale
            axes.fill_between(x, below, above, step="post", **MARKS[AREAS[kind][0]].fill)
            axes.plot(x, above, drawstyle="steps-post", color=shade("surface"), linewidth=0.5)
            below = above
        if tensors is not None and peak >= _NEAR * tensors:
            axes.axhline(tensors / scale, **MARKS["limit"].style)
            legend.insert(0, ("limit", "memory of the device"))
        axes.set_xlim(0.0, x[-1])
        axes.set_ylim(0.0, 1.1 * max(peak, 1) / scale)
        _label_phases(axes, step.calls)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        words = interval if timed else "{:,.0f}".format
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: words(value) if value else "0")
        )
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:.4g} {unit}" if value else "0")
        )
        label = f"{title}: at most {size(peak)}, " + ", ".join(
            f"{AREAS[kind][1]} {size(step.peak[kind])}" for kind in Kind if step.peak[kind]
        )
        svg = svg_of(figure, f"memory{step.index}", label, {})
    notes = ["by time" if timed else "by operators"]
    if step.reserved:
        notes.append(f"without {size(step.reserved)} of the process that hold no tensors")
    return Chart(f"memory{step.index}", title, svg, tuple(legend), ", ".join(notes))


def _points(calls: Sequence[Call]) -> tuple[np.ndarray, np.ndarray]:
    """Return times and bytes by kind, of shapes (n,) and (n, kinds): of moments that are close, the
    one with the most memory.
    """
    x = np.concatenate([call.start + np.array(call.times) for call in calls])
    held = np.concatenate([np.array(call.held, dtype=np.float64) for call in calls])
    end = calls[-1].start + calls[-1].length
    if len(x) > _POINTS:
        starts = np.searchsorted(x, np.linspace(0.0, end, _POINTS, endpoint=False))
        totals = held.sum(axis=1)
        chosen = [
            first + int(totals[first:last].argmax())
            for first, last in zip(starts, [*starts[1:], len(x)], strict=True)
            if last > first
        ]
        x, held = x[chosen], held[chosen]
    if x[0] > 0:  # the rank waits for the first microbatch
        x, held = np.append(0.0, x), np.concatenate([held[:1], held])
    return np.append(x, max(end, float(x[-1]))), np.concatenate([held, held[-1:]])


def _label_phases(axes: Axes, calls: Sequence[Call]) -> None:
    """Write where forward, backward and the update begin, unless actions of a pipeline
    alternate.
    """
    if any(call.work in ("forward", "backward") for call in calls):
        return
    begins: list[tuple[float, str]] = []
    for call in calls:
        begins.append((call.start, "update" if call.work == "update" else "forward"))
        if call.backward is not None and call.backward < len(call.times):
            begins.append((call.start + call.times[call.backward], "backward"))
    end = calls[-1].start + calls[-1].length
    free_from = 0.0
    for at, words in begins:
        if at > 0:
            axes.axvline(at, color=shade("muted"), linewidth=0.6, linestyle=(0, (2, 2)))
        if at >= free_from:
            axes.annotate(
                words,
                (at, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2),
                textcoords="offset points",
                va="top",
                fontsize=9,
                color=shade("muted"),
            )
            free_from = at + 0.14 * end


def _unit(peak: int) -> tuple[int, str]:
    """Return the unit in which a chart shows bytes: its size and its name."""
    return next(each for each in _UNITS if peak >= each[0] or each[0] == 1)


def memory_rows(step: RankStep) -> list[tuple[str, Held]]:
    """Return the memory of a rank by kind at the moments that matter: its beginning, the beginning
    of backward, its peak and the peak of the update.
    """
    first = step.calls[0]
    rows = [("beginning", first.held[0])]
    if first.backward is not None and first.backward < len(first.held):
        rows.append(("beginning of backward", first.held[first.backward]))
    rows.append(("peak", step.peak))
    updates = [held for call in step.calls if call.work == "update" for held in call.held]
    if updates:
        rows.append(("peak of the update", max(updates, key=sum)))
    return rows
