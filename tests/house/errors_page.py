"""Table of exceptions in docs/reference/errors.md: `python -m tests.house.errors_page`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from tests.house.source import ROOT

from trainload.core.errors import RequestError, TrainloadError

PAGE = ROOT / "docs" / "reference" / "errors.md"
BEGIN, END = "<!-- exceptions: generated -->\n", "<!-- end: exceptions -->"


def exceptions(base: type[TrainloadError] = TrainloadError) -> Iterator[type[TrainloadError]]:
    """Yield the subclasses of an exception of `core/errors.py`, each after its base."""
    for kind in sorted(base.__subclasses__(), key=lambda each: each.__name__):
        if kind.__module__ == TrainloadError.__module__:
            yield kind
            yield from exceptions(kind)


def _row(kind: type[TrainloadError]) -> str:
    text = re.split(r"\n\s*\n", inspect.getdoc(kind) or "")[0].replace("\n", " ")
    status = 2 if issubclass(kind, RequestError) else 1
    return f"| `{kind.__name__}` | `{kind.__bases__[0].__name__}` | {status} | {text} |"


def with_table(page: str) -> str:
    """Return a page with its table generated from the classes."""
    lines = ["| exception | is a | status | |", "|---|---|---|---|", *map(_row, exceptions())]
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE.name} has a place for the exceptions"
    return before + BEGIN + "\n".join([*lines, END]) + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
