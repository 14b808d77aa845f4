"""The frame of all pages: one self-contained HTML file.

A browser may run only a script whose digest is in the page's content security policy, so a string
of a package or a run that became markup could not run either.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from trainload.core.formatting import size
from trainload.core.versions import VERSION
from trainload.report.frame.figures import sample
from trainload.report.frame.words import count, moment

MARK = "trainload report"
"""Marker in the first lines of every report."""
_WITH_UNIT = re.compile(
    r"(\d) (?=(?:[KMGT]i?)?B\b|bytes\b|[mun]?s\b|[kMGTP]?FLOPs?\b|rows\b|steps\b|ranks\b|%|UTC\b)"
)

_TIME = re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?Z?)?(?:\N{NO-BREAK SPACE}UTC)?")
_PATH = re.compile(r"(?:[\w.-]*/)+(?=[\w.-]+:\d)")
_PLACE = re.compile(r"[A-Za-z0-9_-]{1,40}\.[a-z]{1,5}:\d{1,7}\b")


def rendered(template: str, *, script: str = "", **values: Any) -> str:
    """Render a page from a template.

    Args:
        template: path of the template in this package.
        script: path of the page's script; "" for none.
        values: variables of the template.
    """
    code = _read(script) if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    frame_values = {
        "mark": MARK,
        "style": Markup(_read("frame/page.css")),
        "script": Markup(code),
        "policy": f"; script-src 'sha256-{digest}'" if code else "",
        "made": moment(time.time()),
        "version": VERSION,
    }
    return _environment().get_template(template).render(**frame_values, **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["key"] = sample
    environment.filters |= {
        "units": keep_units,
        "places": keep_places,
        "size": size,
        "count": count,
    }
    return environment


def keep_units(text: str) -> Markup:
    """Return a text as HTML in which no line breaks between a number and its unit, or in a time."""
    kept = _WITH_UNIT.sub("\\1\N{NO-BREAK SPACE}", str(escape(text)))
    return Markup(_TIME.sub(r'<span class="n">\g<0></span>', kept))  # safe: escaped


def keep_places(text: str) -> Markup:
    """Return a text as HTML in which no line breaks within a file's name and a line number, such as
    "model.py:12". A path before it breaks after a slash.
    """
    paths = _PATH.sub(lambda match: match[0].replace("/", "/<wbr>"), str(escape(text)))
    return Markup(_PLACE.sub(r'<span class="n">\g<0></span>', paths))  # safe: escaped


def _read(name: str) -> str:
    return (files("trainload.report") / name).read_text(encoding="utf-8")
