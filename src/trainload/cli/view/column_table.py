"""Tables that stay readable on a narrow terminal: no word is broken."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

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
        if self._title is not None:
            yield Text(self._title, style="italic")
        for number, (cells, style) in enumerate(self._rows):
            block = Table(show_header=False, box=None, pad_edge=False)
            block.add_column(style="dim", no_wrap=True)
            block.add_column(overflow="fold", style=style)
            for title, cell in zip(self._titles, cells, strict=True):
                if cell.plain:
                    block.add_row(title, cell)
            if number:
                yield Text("")
            yield block


def _longest_line(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(cell_len, _WORD.findall(text)), default=0)
