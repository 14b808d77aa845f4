"""What a refused model is told: each cause with its place and its rewrite, as a page that fits a screen. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINES = 24
"""A message has at most this many lines."""
WIDTH = 140
"""A line of source in it has at most this many characters."""
LONGEST = 1000
"""A sentence in it has at most this many. It is a line by itself, which a terminal wraps: were it wrapped here, the length of a path would
decide where, and a phrase could not be searched for."""
SHOWN = 5
"""So many causes of one model are shown."""
_REWRITE_LINES = 8
_SHORT_REWRITE_LINES = 4
"""Of the first cause's rewrite, where other causes follow."""


@dataclass(frozen=True, slots=True)
class Place:
    """An expression in somebody's source.

    Attributes:
        file: as Python names it.
        line: of its beginning, from 1.
        function: the function that it stands in.
        source: the text of that line without indentation; empty where there is no source.
        start, end: columns of the expression in `source`; `end` is the line's end where the expression goes on. Equal: unknown.
        span: (line, column, last line, last column) as `ast` counts them, for finding it again.
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
        """What the caret stands under; the whole line where the columns are unknown."""
        return self.source[self.start : self.end] or self.source

    def marked(self, width: int) -> list[str]:
        """The source line and one with carets under the expression, both at most `width` long. No lines without source."""
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
        cause: the anchor of its section in docs/capture.md.
        sentence: what happens there, to be read after "the train graph cannot be captured: ".
        advice: what to do, in a sentence.
        rewrite: code to be pasted in place of what stands there; several lines, or none.
        place: where; None where it is nowhere in particular.
    """

    cause: str
    sentence: str
    advice: str
    rewrite: str = ""
    place: Place | None = None

    @property
    def link(self) -> str:
        """The section of the documentation about this cause."""
        return f"docs/capture.md#{self.cause}"

    def as_json(self) -> dict[str, str]:
        """What `--json` says."""
        where = (
            {"where": str(self.place), "source": self.place.source, "expression": self.place.expression} if self.place is not None else {}
        )
        return {"cause": self.cause, "sentence": self.sentence, "advice": self.advice, "rewrite": self.rewrite, "link": self.link, **where}


def page(headline: str, findings: Sequence[Finding], details: str) -> str:
    """Return the whole message: at most `LINES` lines.

    Args:
        headline: a sentence.
        findings: at least one; the first is shown in full, with its rewrite.
        details: what was expected and what was found instead; the last line. May be empty.
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
    said = "" if first.sentence in headline else f"{first.sentence[0].upper()}{first.sentence[1:]}. "
    lines.append(said + first.advice)
    if first.rewrite:
        rewrite = first.rewrite.splitlines()
        most = _SHORT_REWRITE_LINES if rest else _REWRITE_LINES
        lines += [f"    {line[: WIDTH - 4]}" for line in (rewrite if len(rewrite) <= most else [*rewrite[: most - 1], "..."])]
    lines.append(f"See {first.link}")
    if rest:
        lines.append("Also in the way:")
        for number, finding in enumerate(rest[: SHOWN - 1], 2):
            where = f"{finding.place}: " if finding.place is not None else ""
            lines.append(f"  {number}. {where}{finding.sentence} ({finding.link})")
            if finding.place is not None:
                lines += [f"     {line}" for line in finding.place.marked(WIDTH - 5)[: 2 if carets else 1]]
        if len(rest) >= SHOWN:
            lines.append(f"  and {len(rest) - SHOWN + 1} more")
    if details:
        lines += details.splitlines()
    return lines
