"""How much memory a call takes, to the byte."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most that torch's CPU allocator held during a call, beyond what it held before. The
    result is held while it is measured.

    torch's profiler writes down every allocation, also those of compiled code: the figure is the
    same every time.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held = call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    del held
    allocations = sorted(
        (e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"
    )
    assert allocations, "the profiler wrote no allocation down"
    now = peak = 0
    for _, size in allocations:
        now += size
        peak = max(peak, now)
    return int(peak)
