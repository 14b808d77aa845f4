"""Figures as SVG inside a page: colours and fonts are the page's, in its light and in its dark form."""

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

SHADES = ("ink", "muted", "grid", "surface", "train", "evaluation", "good", "warning", "failure", "again", "idle")
"""Colours of the page, as the variables `--ink`, ... of its style."""
_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_FONT = 11.0
_WRITTEN = re.compile(r"#0[0-9a-f]de0[0-9a-f]")
_FAMILY = re.compile(r"font:\s*(?P<size>[\d.]+)px[^;\"]*")


def shade(name: str) -> str:
    """What to tell matplotlib in place of a colour of the page: one of its own that stands for it."""
    number = SHADES.index(name)
    return f"#0{number:x}de0{number:x}"


@contextmanager
def drawing() -> Iterator[None]:
    """Within it figures are drawn in the page's manner: texts stay texts, and the same figure gives the same bytes."""
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


def svg_of(figure: Figure, name: str, label: str, titles: Mapping[str, str]) -> str:
    """The figure as an element of a page.

    Args:
        figure: drawn with `shade`s.
        name: of its own in the page; the names inside begin with it.
        label: what it shows, for those who do not see it.
        titles: gid of an artist -> what is said where the mouse is over it.
    """
    written = io.StringIO()
    FigureCanvasSVG(figure)
    figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(written.getvalue())
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label, "class": "chart"}
    for child in list(root):
        if child.tag == f"{{{_SVG}}}metadata":
            root.remove(child)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{{{_SVG}}}style":
                parent.remove(child)
    for element in root.iter():
        said = titles.get(element.attrib.get("id", ""))
        if said is not None:
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = said
            element.insert(0, title)
    _rename(root, name)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        element.attrib = {key.replace(f"{{{_LINK}}}", ""): _in_page(value) for key, value in element.attrib.items()}
        if element.tag != "text" and element.tag != "title" and element.text is not None and not element.text.strip():
            element.text = None
        element.tail = None
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _rename(root: ElementTree.Element, name: str) -> None:
    """Names that are used begin with that of the figure; others go."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    for element in root.iter():
        named = element.attrib.pop("id", None)
        if named in used:
            element.attrib["id"] = f"{name}-{named}"
        for key, value in element.attrib.items():
            value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
            element.attrib[key] = re.sub(r"^#(.+)$", rf"#{name}-\1", value) if key.endswith("href") else value


def _in_page(value: str) -> str:
    """An attribute with the page's colours and font."""
    value = _WRITTEN.sub(lambda found: f"var(--{SHADES[int(found[0][2], 16)]})", value)
    return _FAMILY.sub(r"font-size: \g<size>px", value)
