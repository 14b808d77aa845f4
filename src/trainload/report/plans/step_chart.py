"""Timeline of an update: compute, waiting and collectives of one rank of each place of the
pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trainload.core.formatting import interval
from trainload.report.frame.figures import MARKS
from trainload.report.frame.svg import drawing, svg_of
from trainload.sharding.planner.step_memory import Call, RankStep

_LANE = 0.3
"""Height of a lane in inches."""
_RESOLUTION = 500
"""Bars that are closer than this part of the width are drawn as one."""
_MOST_BARS = 200
LEGEND = {
    "train bar": "forward",
    "violet bar": "backward",
    "good bar": "update",
    "warning bar": "waiting",
    "teal bar": "collective",
    "idle bar": "copy to or from the host",
}
"""Kind of bar -> its description."""
_WORK = {"forward": "train bar", "backward": "violet bar", "update": "good bar"}


@dataclass(frozen=True, slots=True)
class _Bar:
    start: float
    end: float
    kind: str


@dataclass(frozen=True, slots=True)
class Total:
    """Time of all calls of one operator.

    Attributes:
        operator: its name.
        bound: what bounds it, as in `Row.why`.
        calls: number of calls that take time.
        seconds: time of all of them.
    """

    operator: str
    bound: str
    calls: int
    seconds: float


def step_chart(steps: Sequence[RankStep], name: str, width: float) -> tuple[str, set[str]]:
    """Return the timeline as SVG, and the kinds of bars in it.

    Args:
        steps: updates of the ranks to show, which have times.
        name: name that is unique in the page.
        width: width in inches.
    """
    lanes: dict[str, list[_Bar]] = {}
    for step in steps:
        prefix = f"{step.index}: " if len(steps) > 1 else ""
        lanes[f"{prefix}compute"] = []
        for lane, bar in _bars(step):
            lanes.setdefault(prefix + lane, []).append(bar)
    end = max(call.start + call.length for step in steps for call in step.calls)
    kinds: set[str] = set()
    titles: dict[str, str] = {}
    with drawing():
        figure = Figure(figsize=(width, _LANE * len(lanes) + 0.45), layout="constrained")
        axes = figure.add_subplot()
        for row, (lane, bars) in enumerate(lanes.items()):
            for kind in dict.fromkeys(bar.kind for bar in bars):
                kinds.add(kind)
                own = [bar for bar in bars if bar.kind == kind]
                merged = _merge(own, end / _RESOLUTION)
                artist = axes.broken_barh(
                    [(bar.start, max(bar.end - bar.start, end / 900)) for bar in merged],
                    (row - 0.36, 0.72),
                    **MARKS[kind].fill,
                )
                gid = f"{name}-{row}-{kind.replace(' ', '-')}"
                artist.set_gid(gid)
                total = sum(bar.end - bar.start for bar in own)
                titles[gid] = f"{lane}, {LEGEND[kind]}: {len(own)} times, {interval(total)}"
        axes.set_xlim(0.0, end)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(lanes)), list(lanes))
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(4 if width < 6 else 8))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: interval(value) if value > 0 else "0")
        )
        label = f"Compute and collectives of an update, which takes {interval(end)}"
        return svg_of(figure, name, label, titles), kinds


def _bars(step: RankStep) -> Iterator[tuple[str, _Bar]]:
    """Yield (lane, bar)."""
    if any(call.work in ("forward", "backward") for call in step.calls):
        for call in step.calls:
            yield "compute", _Bar(call.start, call.start + call.length, _WORK[call.work])
    for call in step.calls:
        assert call.line is not None
        for at, row in enumerate(call.line.rows):
            if not row.seconds:
                continue
            bar = call.start + row.start, call.start + row.start + row.seconds
            if row.why == "link":
                lane = row.operator.removesuffix("_into_tensor").removesuffix("_tensor")
                yield lane, _Bar(*bar, "teal bar")
            elif row.why == "host":
                yield "host", _Bar(*bar, "idle bar")
            elif row.why == "wait":
                yield "compute", _Bar(*bar, "warning bar")
            elif call.work in ("step", "update"):
                yield "compute", _Bar(*bar, _WORK[_phase(call, at)])


def _phase(call: Call, at: int) -> str:
    if call.work == "update":
        return "update"
    return "forward" if call.backward is None or at < call.backward else "backward"


def _merge(bars: Sequence[_Bar], gap: float) -> list[_Bar]:
    """Merge bars that are closer than `gap`, and ever farther ones until there are few."""
    merged = list(bars)
    while True:
        joined: list[_Bar] = []
        for bar in sorted(merged, key=lambda bar: bar.start):
            if joined and bar.start - joined[-1].end <= gap:
                last = joined[-1]
                joined[-1] = _Bar(last.start, max(last.end, bar.end), bar.kind)
            else:
                joined.append(bar)
        if len(joined) <= _MOST_BARS:
            return joined
        merged, gap = joined, 2 * gap


def totals(steps: Sequence[RankStep], most: int) -> list[Total]:
    """Return the operators that take the most time in the given calls, at most `most` of them."""
    calls: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        for call in step.calls:
            for row in call.line.rows if call.line is not None else ():
                if row.seconds:
                    calls[row.operator, row.why].append(row.seconds)
    found = [Total(*key, len(seconds), sum(seconds)) for key, seconds in calls.items()]
    return sorted(found, key=lambda each: -each.seconds)[:most]
