"""What a report says of strings and numbers of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from trainload.core.formatting import clock, duration

_SIGN_IN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/@'\"]*@")
_QUERY = re.compile(r"(?P<url>[A-Za-z][A-Za-z0-9+.-]*://[^\s?'\"]*)\?[^\s'\")]*")
_LONGEST = 2000


def told(text: str, longest: int = _LONGEST) -> str:
    """A string of the run for its page: without what URLs hold of names, passwords and signatures, and no longer than that."""
    text = _QUERY.sub(r"\g<url>?…", _SIGN_IN.sub(r"\g<scheme>…@", text))
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def moment(seconds: float) -> str:
    """A time in UTC, to the second."""
    return clock(seconds)


def hour(seconds: float) -> str:
    """The time of day alone, in UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def span(seconds: float) -> str:
    """Of time: "0.4s", "1m15s", "2d3h"."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    days, rest = divmod(round(seconds), 86400)
    return f"{days}d{rest // 3600}h" if days else duration(seconds)


def count(value: float) -> str:
    """A number with few digits: "950", "12.3k", "4.6M"."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ranks(numbers: Iterable[int]) -> str:
    """Ranks with stretches drawn together: "0-3, 7"."""
    stretches: list[list[int]] = []
    for number in sorted(numbers):
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in stretches)


def percent(share: float) -> str:
    """A share: 0.123 is "12.3%"."""
    return f"{share:.1%}"
