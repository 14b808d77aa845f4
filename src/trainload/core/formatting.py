"""Times, durations and sizes as people read them."""

from __future__ import annotations

import time


def clock(seconds: float) -> str:
    """A time in UTC, from seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """`75.2` -> "1m15s"."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"


def size(count: int) -> str:
    """Bytes for people: `1536` -> "1.5 KiB"."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit returns")
