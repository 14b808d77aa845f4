"""Table of the operators and kernels of a trace in Chrome's format.

It is computed from the file, since torch's own table of 100,000 operators takes 20 seconds.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainload.launching.profiling.profile_result import OperatorTime
from trainload.launching.profiling.step_trace import STEP

_MOST_OPERATORS = 100
"""Maximum number of operators in the table."""
COMPILED = "compiled kernels"
"""Name for what compiled graphs compute without calling operators, on CPUs."""
_INDUCTOR = "## Call CompiledFxGraph"
"""Beginning of the name of the range in which torch runs a compiled graph."""
_ON_CPU = frozenset({"cpu_op", "user_annotation"})
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def operators_of(trace: Path, steps: int, *, is_gpu: bool) -> tuple[OperatorTime, ...]:
    """Return what took the most time, the longest first, per step.

    Args:
        trace: file in Chrome's format, compressed.
        steps: number of steps in it.
        is_gpu: True to list the kernels of the GPU, False for operators and ranges of the CPU.
    """
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    categories = _ON_GPU if is_gpu else _ON_CPU
    shown = [event for event in events if event.get("cat") in categories and "dur" in event]
    calls: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, own in _own_times(shown):
        calls[name] += 1
        seconds[name] += own / 1e6
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return tuple(
        OperatorTime(name, calls[name] / steps, seconds[name] / steps)
        for name in ordered[:_MOST_OPERATORS]
    )


def _own_times(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the name of each event, and its microseconds without those of the events within it."""
    threads: defaultdict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for of_thread in threads.values():
        of_thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        pending: list[tuple[str, float, list[float]]] = []  # name, end, [own time]
        for event in of_thread:
            while pending and event["ts"] >= pending[-1][1]:
                name, _, own = pending.pop()
                yield name, max(own[0], 0.0)
            if pending:
                pending[-1][2][0] -= event["dur"]
            end = event["ts"] + event["dur"]
            pending.append((_name_of(event["name"]), end, [event["dur"]]))
        for name, _, own in pending:
            yield name, max(own[0], 0.0)


def _name_of(name: str) -> str:
    """Return the name under which an operator, kernel or range is listed."""
    if name.startswith(_INDUCTOR):
        return COMPILED
    return STEP if name.startswith(f"{STEP} ") else name
