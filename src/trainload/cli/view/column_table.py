"""Tables that stay readable on a narrow terminal: no word is broken."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

_WORD = re.compile(r"^[^\S\n]*\S+|\S+", re.MULTILINE)
"""A word; the first of a line includes the indentation, which rich does not separate from it."""
_GAP = 2
"""Spaces between two columns."""


class Columns:
    """A table with titles above its columns.

    If the longest words of all columns do not fit side by side, each row is a block of lines
    "title  value".

        found = Columns(("operator", "calls"), right={"calls"})
        found.add("aten.add.Tensor", "12")
        console.print(found)

    Args:
        titles: titles of the columns.
        title: title of the table.
        right: titles of the columns that are aligned to the right.
    """

    def __init__(
        self, titles: Sequence[str], *, title: str | None = None, right: Collection[str] = ()
    ) -> None:
        self._titles, self._title, self._right = tuple(titles), title, frozenset(right)
        self._rows: list[tuple[tuple[Text, ...], str | Style]] = []

    def add(self, *cells: str | Text, style: str | Style = "") -> None:
        """Add a row. Strings are shown unchanged; omitted cells are empty."""
        texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        texts += [Text("")] * (len(self._titles) - len(texts))
        self._rows.append((tuple(texts), style))

    def _widths(self, room: int) -> list[int] | None:
        """Return the width of each column, or None if words would break.

        Each column gets the width of its longest line, or what is left of the terminal's width,
        from left to right.
        """
        texts = [
            [title, *(str(cells[place]) for cells, _ in self._rows)]
            for place, title in enumerate(self._titles)
        ]
        widths = [max(map(_longest_word, column)) for column in texts]
        remaining = room - sum(widths) - _GAP * (len(widths) - 1)
        if remaining < 0:
            return None
        for place, column in enumerate(texts):
            more = min(remaining, max(map(_longest_line, column)) - widths[place])
            widths[place] += more
            remaining -= more
        return widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        if widths is not None:
            table = Table(box=None, pad_edge=False, title=self._title, title_justify="left")
            for title, width in zip(self._titles, widths, strict=True):
                table.add_column(
                    title,
                    justify="right" if title in self._right else "left",
                    width=width,
                    overflow="fold",
                )
            for cells, style in self._rows:
                table.add_row(*cells, style=style)
            yield table
            return
        for number, (cells, style) in enumerate(self._rows):
            if number:
                yield Text("")
            filled = [
                (title, cell) for title, cell in zip(self._titles, cells, strict=True) if cell.plain
            ]
            yield Pairs(filled, title=None if number else self._title, style=style)


class Pairs:
    """Lines "name  value", whose values are wrapped between words.

    A word that is longer than a line is printed whole, so that a path or a digest can be copied;
    the console must not crop lines.

    Args:
        rows: names and values.
        title: title of the lines.
        style: style of the values.
    """

    def __init__(
        self,
        rows: Sequence[tuple[str, Text]],
        *,
        title: str | None = None,
        style: str | Style = "",
    ) -> None:
        self._rows, self._title, self._style = tuple(rows), title, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title is not None:
            yield Text(self._title, style="italic")
        column = max((cell_len(name) for name, _ in self._rows), default=0) + _GAP
        for name, value in self._rows:
            label = f"{name}{' ' * (column - cell_len(name))}"
            for part in _wrapped(value, options.max_width - column):
                part.stylize_before(self._style)
                line = Text.assemble((label, "dim"), part, no_wrap=True, overflow="ignore")
                line.rstrip()
                yield line
                label = " " * column


def _wrapped(text: Text, width: int) -> Iterator[Text]:
    """Yield the lines of a text, broken between words."""
    for line in text.split("\n", allow_blank=True):
        breaks: list[int] = []
        began = 0
        for word in _WORD.finditer(line.plain):
            if word.start() > began and cell_len(line.plain[began : word.end()]) > width:
                breaks.append(word.start())
                began = word.start()
        for part in line.divide(breaks):
            part.rstrip()
            yield part


def _longest_line(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(cell_len, _WORD.findall(text)), default=0)
