"""The frame of all reports: one self-contained HTML file."""

from __future__ import annotations

import time
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from trainload.core.versions import VERSION
from trainload.report.words import moment

MARK = "trainload report"
"""Marker in the first lines of every report."""


def rendered(template: str, **values: Any) -> str:
    """Render a page from a template."""
    frame_values = {
        "mark": MARK,
        "style": Markup(_read("page.css")),
        "made": moment(time.time()),
        "version": VERSION,
    }
    return _environment().get_template(template).render(**frame_values, **values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _read(name: str) -> str:
    return (files("trainload.report") / name).read_text(encoding="utf-8")
