"""Measurement of the peak memory of a call, to the byte."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the peak memory of a call in torch's CPU allocator, in bytes, above the initial level.

    The result of the call is alive while it is measured. The profiler of torch records every
    allocation, including those of compiled code, so the figure is deterministic.
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
