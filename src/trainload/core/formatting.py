"""Readable times, durations and sizes."""

from __future__ import annotations

import time


def clock(seconds: float) -> str:
    """Format seconds since 1970 as a time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Format seconds: `75.2` -> "1m15s"."""
    total_seconds = round(seconds)
    hours, minutes = total_seconds // 3600, total_seconds // 60 % 60
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{total_seconds % 60:02}s" if minutes else f"{total_seconds}s"


def size(count: int) -> str:
    """Format bytes: `1536` -> "1.5 KiB"."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit returns")


def interval(seconds: float) -> str:
    """Format a short time: `0.0123` -> "12.3 ms"."""
    for least, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
