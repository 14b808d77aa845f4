"""Suggestions for a name that is not known: the hint of every error about a typo."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LOOSE = 0.3
"""Similarity from which names that are listed for comparison count as similar; of 1."""


def similar(name: str, known: Sequence[str], most: int) -> list[str]:
    """Return at most `most` known names that bear some similarity to `name`, the nearest first."""
    return difflib.get_close_matches(name, known, n=most, cutoff=_LOOSE)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar.

    Upper and lower case are not distinguished. If no name is similar as a whole, one that begins
    like the other counts: "lr" for "lr_rate", "strategy" for "strat".

    >>> nearest("luanch", ["launch", "lineage"])
    'launch'
    """
    folded = {each.casefold(): each for each in known}
    name = name.casefold()
    close = difflib.get_close_matches(name, folded, n=1)
    if close:
        return folded[close[0]]
    begins = [
        each
        for each in folded
        if min(len(each), len(name)) > 1 and (name.startswith(each) or each.startswith(name))
    ]
    # the one with the most letters in common; of several, the first in the alphabet
    best = max(sorted(begins), key=lambda each: min(len(each), len(name)), default=None)
    return None if best is None else folded[best]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the hint that names the most similar known name; `otherwise` if none is similar.

    >>> did_you_mean("zero4", ["single", "zero3"])
    'Did you mean zero3?'
    """
    found = nearest(name, known)
    return otherwise if found is None else f"Did you mean {found}?"
