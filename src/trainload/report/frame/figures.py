"""Charts of pages, and the marks that their legends explain.

A kind of mark has one style, which both the chart and the legend are drawn with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from trainload.report.frame.svg import drawing, shade, svg_of

CHART_SIZE = (6.4, 2.75)
"""Width and height of a chart in inches."""
_SAMPLE = (20, 12)
"""Width and height of a mark in a legend, in points."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart for the page.

    Attributes:
        name: name that is unique in the page.
        title: title of the chart.
        svg: the SVG element.
        legend: (name in `MARKS`, text) of each entry.
        note: remark about the drawing, such as its scale; "" for none.
    """

    name: str
    title: str
    svg: str
    legend: tuple[tuple[str, str], ...]
    note: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Style of one kind of line, point or area.

    Attributes:
        shade: color of the page.
        width: width of the line in points; 0 for none.
        dashes: lengths of dashes and gaps; () for a continuous line.
        marker: shape of points; "" for none.
        size: size of points.
        edge: width of the points' outlines.
        alpha: opacity.
        area: True for a filled area instead of a line.
        upright: True for vertical lines.
    """

    shade: str
    width: float = 1.4
    dashes: tuple[float, ...] = ()
    marker: str = ""
    size: float = 5.0
    edge: float = 1.0
    alpha: float = 1.0
    area: bool = False
    upright: bool = False

    @property
    def style(self) -> dict[str, Any]:
        """Arguments of matplotlib for lines and points."""
        return {
            "color": shade(self.shade),
            "linewidth": self.width,
            "linestyle": "none" if not self.width else (0, self.dashes) if self.dashes else "-",
            "marker": self.marker or None,
            "markersize": self.size,
            "markeredgewidth": self.edge,
            "alpha": self.alpha,
            "solid_capstyle": "round",
        }

    @property
    def fill(self) -> dict[str, Any]:
        """Arguments of matplotlib for areas and bars."""
        return {"color": shade(self.shade), "alpha": self.alpha, "linewidth": 0}


_BARS = ("train", "evaluation", "good", "warning", "failure", "idle", "violet", "teal")
MARKS: Mapping[str, Mark] = MappingProxyType(
    {
        "train": Mark("train"),
        "lone": Mark("train", marker="o"),
        "band": Mark("train", alpha=0.25, area=True),
        "evaluation": Mark("evaluation", marker="o", size=3.2),
        "again": Mark("again", width=6.0, alpha=0.55),
        "restart": Mark("failure", width=0.9, dashes=(3, 3), upright=True),
        "checkpoint": Mark("good", width=0, marker="|", size=9, edge=1.4),
        "broken": Mark("failure", width=0, marker="v", size=6),
        "champion": Mark("evaluation"),
        "promoted": Mark("good", width=0, marker="o"),
        "rejected": Mark("failure", width=0, marker="x", edge=1.4),
        "conflict": Mark("warning", width=0, marker="D"),
        "undecided": Mark("muted", width=0, marker=".", size=7),
        "drift": Mark("train", marker=".", size=7),
        "prepared": Mark("idle", alpha=0.45, area=True),
        "limit": Mark("failure", dashes=(4, 2)),
        **{f"{name} bar": Mark(name, alpha=0.9, area=True) for name in _BARS},
        **{
            f"{name} area": Mark(name, area=True)
            for name in ("train", "evaluation", "good", "violet", "teal", "idle")
        },
    }
)
"""Name of a kind of mark -> its style."""


@cache
def sample(kind: str) -> Markup:
    """Return a mark for a legend, as an SVG element that readers of the page's text skip.

    Args:
        kind: name in `MARKS`.
    """
    mark = MARKS[kind]
    width, height = _SAMPLE
    with drawing():
        figure = Figure(figsize=(width / 72, height / 72))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(0, height)
        if mark.area:
            axes.fill_between([3, width - 3], 1, height - 1, **mark.fill, clip_on=False)
        elif mark.upright:
            axes.plot([width / 2] * 2, [0, height], **mark.style, clip_on=False)
        else:
            line = [3.0, width / 2, width - 3.0] if mark.width else [width / 2]
            (artist,) = axes.plot(line, [height / 2] * len(line), **mark.style, clip_on=False)
            artist.set_markevery([len(line) // 2])
        svg = svg_of(figure, f"key-{kind.replace(' ', '-')}", None, {})
    return Markup(svg)  # safe: it holds no text
