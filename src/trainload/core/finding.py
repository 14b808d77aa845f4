"""Reports for models that cannot be captured: each cause with its place and a fix, on one screen.

Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINES = 24
"""Maximum number of lines of a message."""
WIDTH = 140
"""Maximum number of characters of a source line in it."""
LONGEST = 1000
"""Maximum number of characters of a sentence in it.

A sentence is one line, which the terminal wraps. If it were wrapped here, the length of a path
would decide the line breaks, and a phrase could not be searched for.
"""
SHOWN = 5
"""Maximum number of causes that are shown."""
_REWRITE_LINES = 8
_SHORT_REWRITE_LINES = 4
"""Maximum number of lines of the first cause's rewrite if other causes follow."""


@dataclass(frozen=True, slots=True)
class Place:
    """An expression in the user's source.

    Attributes:
        file: file name as in Python's tracebacks.
        line: first line, from 1.
        function: enclosing function.
        source: text of the line without indentation; empty if there is no source.
        start, end: columns of the expression in `source`; `end` is the line's end if the expression
            continues on the next line. Equal if unknown.
        span: (line, column, last line, last column) as in `ast`, in order to find the expression
            again.
    """

    file: str
    line: int
    function: str = ""
    source: str = ""
    start: int = 0
    end: int = 0
    span: tuple[int, int, int, int] = (0, 0, 0, 0)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def expression(self) -> str:
        """Text of the expression; the whole line if its columns are unknown."""
        return self.source[self.start : self.end] or self.source

    def marked(self, width: int) -> list[str]:
        """Return the source line and a line of carets under the expression, both at most `width`
        long; [] without source.
        """
        if not self.source:
            return []
        first = max(0, min(self.start - 20, self.end - width)) if self.end > width else 0
        text = self.source[first : first + width]
        start, end = self.start - first, min(self.end - first, len(text))
        return [text, " " * start + "^" * (end - start)] if start < end else [text]


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a model cannot be captured.

    Attributes:
        cause: anchor of its section in docs/guides/capture.md.
        sentence: the problem, as a continuation of "the train graph cannot be captured: ".
        advice: a hint, as a sentence.
        rewrite: replacement code, of several lines or empty.
        place: place in the source; None if there is no particular one.
    """

    cause: str
    sentence: str
    advice: str
    rewrite: str = ""
    place: Place | None = None

    @property
    def link(self) -> str:
        """Link to the section of the documentation about this cause."""
        return f"docs/guides/capture.md#{self.cause}"

    def as_json(self) -> dict[str, str]:
        """Return the fields for `--json`."""
        where = (
            {
                "where": str(self.place),
                "source": self.place.source,
                "expression": self.place.expression,
            }
            if self.place is not None
            else {}
        )
        return {
            "cause": self.cause,
            "sentence": self.sentence,
            "advice": self.advice,
            "rewrite": self.rewrite,
            "link": self.link,
            **where,
        }


def page(headline: str, findings: Sequence[Finding], details: str) -> str:
    """Return the complete message, of at most `LINES` lines.

    Args:
        headline: a sentence.
        findings: at least one; the first is shown in full, with its rewrite.
        details: last line, with the expected and actual values. May be empty.
    """
    for carets in (True, False):
        lines = _lines(headline, findings, details, carets)
        if len(lines) <= LINES:
            break
    return "\n".join(line[:LONGEST].rstrip() for line in lines[:LINES])


def _lines(headline: str, findings: Sequence[Finding], details: str, carets: bool) -> list[str]:
    first, *rest = findings
    lines = [headline]
    if first.place is not None:
        lines += [] if str(first.place) in headline else [f"{first.place}:"]
        lines += [f"    {line}" for line in first.place.marked(WIDTH - 4)]
    sentence = (
        "" if first.sentence in headline else f"{first.sentence[0].upper()}{first.sentence[1:]}. "
    )
    lines.append(sentence + first.advice)
    if first.rewrite:
        rewrite = first.rewrite.splitlines()
        most = _SHORT_REWRITE_LINES if rest else _REWRITE_LINES
        lines += [
            f"    {line[: WIDTH - 4]}"
            for line in (rewrite if len(rewrite) <= most else [*rewrite[: most - 1], "..."])
        ]
    lines.append(f"See {first.link}")
    if rest:
        lines.append("Also in the way:")
        for number, finding in enumerate(rest[: SHOWN - 1], 2):
            where = f"{finding.place}: " if finding.place is not None else ""
            lines.append(f"  {number}. {where}{finding.sentence} ({finding.link})")
            if finding.place is not None:
                lines += [
                    f"     {line}" for line in finding.place.marked(WIDTH - 5)[: 2 if carets else 1]
                ]
        if len(rest) >= SHOWN:
            lines.append(f"  and {len(rest) - SHOWN + 1} more")
    if details:
        lines += details.splitlines()
    return lines
