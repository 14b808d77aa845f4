"""An extension of griffe: docstrings as the site shows them.

- Code after `Example:` is shown as code; griffe reads Google's section as text.
- A page that a docstring names ("docs/guides/data.md") is a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(Example:\n)((?: {4}.*\n?|\n)+)", re.MULTILINE)
_PAGE = re.compile(r"`?docs/([\w/-]+)\.md(#[\w-]+)?`?")


def _fenced(match: re.Match[str]) -> str:
    """Return an example as a fenced block within its section."""
    code = match[2].rstrip("\n")
    return f"{match[1]}    ```python\n{code}\n    ```\n\n"


def _linked(match: re.Match[str]) -> str:
    """Return a link from a page of reference/api/."""
    page, anchor = match[1], match[2] or ""
    return f"[{page.rpartition('/')[2]}](../../{page}.md{anchor})"


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(_fenced, obj.docstring.value)
            obj.docstring.value = _PAGE.sub(_linked, text)
