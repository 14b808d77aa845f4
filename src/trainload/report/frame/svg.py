"""Render figures as SVG elements with the colors and fonts of the page.

matplotlib writes colors into attributes. Each color of a figure is a placeholder for a variable of
the page's style, so that one SVG serves for the light and the dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

SHADES = (
    "ink",
    "muted",
    "grid",
    "surface",
    "train",
    "evaluation",
    "good",
    "warning",
    "failure",
    "again",
    "idle",
    "violet",
    "teal",
)
"""Colors of the page: the variables `--ink`, ... of its style."""
_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_FONT = 11.0
_PLACEHOLDER = re.compile(r"#0[0-9a-f]de0[0-9a-f]")
_LONG_NUMBER = re.compile(r"(\d\.\d\d)\d+")
"""A coordinate in points: a hundredth of one cannot be seen."""
_FAMILY = re.compile(r"font:\s*(?P<size>[\d.]+)px[^;\"]*")


def shade(name: str) -> str:
    """Return the placeholder color for matplotlib that stands for a color of the page."""
    number = SHADES.index(name)
    return f"#0{number:x}de0{number:x}"


@contextmanager
def drawing() -> Iterator[None]:
    """Apply the page's style to figures within the context: texts remain texts, and the output is
    deterministic.
    """
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "trainload",
        "font.size": _FONT,
        "text.color": shade("ink"),
        "text.parse_math": False,
        "axes.edgecolor": shade("grid"),
        "axes.labelcolor": shade("muted"),
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "figure.facecolor": "none",
        "grid.color": shade("grid"),
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.4,
        "lines.solid_joinstyle": "round",
        "path.simplify": False,
        "xtick.color": shade("muted"),
        "ytick.color": shade("muted"),
        "xtick.major.size": 3.0,
        "xtick.major.width": 0.8,
        "ytick.major.size": 0.0,
        "ytick.minor.size": 0.0,
    }
    with matplotlib.rc_context(style):
        yield


def svg_of(figure: Figure, name: str, label: str | None, titles: Mapping[str, str]) -> str:
    """Return a figure as an SVG element of a page.

    Args:
        figure: figure that was drawn with colors of `shade`.
        name: name that is unique in the page, and prefix of the ids inside.
        label: description for screen readers; None for a mark of a legend, which they skip.
        titles: gid of an artist -> its tooltip.
    """
    buffer = io.StringIO()
    FigureCanvasSVG(figure)
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    root = ElementTree.fromstring(buffer.getvalue())
    described = (
        {"class": "key", "aria-hidden": "true"}
        if label is None
        else {"role": "img", "aria-label": label, "class": "chart"}
    )
    root.attrib = {"viewBox": root.attrib["viewBox"], **described}
    for child in list(root):
        if child.tag == f"{{{_SVG}}}metadata":
            root.remove(child)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}style":  # matplotlib's style would apply to the whole page
                parent.remove(child)
    for element in root.iter():
        tooltip = titles.get(element.attrib.get("id", ""))
        if tooltip is not None:
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = tooltip
            element.insert(0, title)
    if label is None:
        _resolve_references(root)
    _rename(root, name)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        element.attrib = {
            key.replace(f"{{{_LINK}}}", ""): (
                _LONG_NUMBER.sub(r"\1", value) if key == "d" else _use_page_style(value)
            )
            for key, value in element.attrib.items()
        }
        if (
            element.tag != "text"
            and element.tag != "title"
            and element.text is not None
            and not element.text.strip()
        ):
            element.text = None
        element.tail = None
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _resolve_references(root: ElementTree.Element) -> None:
    """Put shapes where they are used, so that a mark that is in a page several times has no ids."""
    shapes = {element.attrib.get("id"): element for element in root.iter(f"{{{_SVG}}}path")}
    for parent in list(root.iter()):
        for place, child in enumerate(list(parent)):
            if child.tag == f"{{{_SVG}}}use":
                shape = shapes[child.attrib[f"{{{_LINK}}}href"].removeprefix("#")]
                where = f"translate({child.attrib['x']} {child.attrib['y']})"
                style = {"style": child.attrib["style"], "transform": where}
                parent[place] = ElementTree.Element(shape.tag, {"d": shape.attrib["d"], **style})
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}defs":
                parent.remove(child)


def _rename(root: ElementTree.Element, name: str) -> None:
    """Prefix ids that are referenced with the figure's name, since matplotlib repeats ids in every
    figure; remove others.
    """
    text = ElementTree.tostring(root, encoding="unicode")
    referenced = set(re.findall(r"url\(#([^)]+)\)", text)) | set(
        re.findall(r'href="#([^"]+)"', text)
    )
    for element in root.iter():
        element_id = element.attrib.pop("id", None)
        if element_id in referenced:
            element.attrib["id"] = f"{name}-{element_id}"
        for key, value in element.attrib.items():
            value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
            element.attrib[key] = (
                re.sub(r"^#(.+)$", rf"#{name}-\1", value) if key.endswith("href") else value
            )


def _use_page_style(value: str) -> str:
    """Replace placeholder colors and the font in an attribute by the page's."""
    value = _PLACEHOLDER.sub(lambda match: f"var(--{SHADES[int(match[0][2], 16)]})", value)
    return _FAMILY.sub(r"font-size: \g<size>px", value)
