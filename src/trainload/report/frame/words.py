"""Format strings and numbers for reports."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from trainload.core.formatting import clock, duration

# a scheme begins where no such letter precedes, so that a long word is scanned once
_SCHEME = r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+://"
_SIGN_IN = re.compile(rf"(?P<scheme>{_SCHEME})[^\s/@'\"]*@")
_QUERY = re.compile(rf"(?P<url>{_SCHEME}[^\s?'\"]*)\?[^\s'\")]*")
_LONGEST = 2000


def sanitize(text: str, longest: int = _LONGEST) -> str:
    """Return a string of a run for its report: truncated, and without user names, passwords and
    signatures in URLs.
    """
    text = _QUERY.sub(r"\g<url>?…", _SIGN_IN.sub(r"\g<scheme>…@", text))
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def moment(seconds: float) -> str:
    """Format a time in UTC, to the second."""
    return clock(seconds)


def hour(seconds: float) -> str:
    """Format the time of day in UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def span(seconds: float) -> str:
    """Format a duration: "0.4s", "1m15s", "2d3h"."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    days, remainder = divmod(round(seconds), 86400)
    return f"{days}d{remainder // 3600}h" if days else duration(seconds)


def count(value: float) -> str:
    """Format a number with few digits: "950", "12.3k", "4.6M"."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ranks(numbers: Iterable[int]) -> str:
    """Format ranks with ranges: "0-3, 7"."""
    stretches: list[list[int]] = []
    for number in sorted(numbers):
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    return ", ".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in stretches
    )


def percent(share: float) -> str:
    """Format a fraction: 0.123 is "12.3%"."""
    return f"{share:.1%}"
