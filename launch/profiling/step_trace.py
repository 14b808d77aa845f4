"""Trace of the steps of a rank as they run, by torch.profiler."""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from trainload.launching.node.built_graphs import Built, BuiltGraph, Call
from trainload.launching.profiling.profile_result import OperatorTime

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_MOST_OPERATORS = 100
"""Maximum number of operators in the table."""
STEP = "step"
COMPILED = "compiled kernels"
"""Name for what compiled graphs compute without calling operators, on CPUs."""
_INDUCTOR = "## Call CompiledFxGraph"
"""Beginning of the name of the range in which torch runs a compiled graph."""
GRAPH = "graph "
UPDATE = "update "
"""Beginnings of the names of ranges, before the name of a graph or an update within the build."""


class StepTrace:
    """Recorder of operators, kernels and ranges of this process.

    Args:
        device: device of the rank.
        rank: the rank.
        step: number of the first step, from 1.
    """

    def __init__(self, device: torch.device, rank: int, step: int) -> None:
        self._is_gpu = device.type == "cuda"
        if not self._is_gpu:
            # otherwise torch prints two lines for each trace to standard error (torch 2.13); on
            # GPUs the same setting would hide errors
            os.environ.setdefault(_LOG_LEVEL, "6")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_gpu else [])]
        self._profiler = profile(activities=activities)
        self._metadata = {"rank": rank, "host": socket.gethostname(), "step": step}

    def start(self) -> None:
        """Begin to record.

        Raises:
            RuntimeError: another profiler is active in this process.
        """
        self._profiler.start()
        for name, value in self._metadata.items():
            self._profiler.add_metadata_json(name, json.dumps(value))

    def stop(self) -> None:
        """End the recording."""
        self._profiler.stop()

    def export(self, path: Path) -> None:
        """Write the trace in Chrome's format, compressed if the name ends with .gz."""
        self._profiler.export_chrome_trace(str(path))

    def operators(self, steps: int) -> tuple[OperatorTime, ...]:
        """Return what took the most time, the longest first, per step of `steps`."""
        calls: defaultdict[str, float] = defaultdict(float)
        seconds: defaultdict[str, float] = defaultdict(float)
        for each in self._profiler.key_averages():
            name = _name_of(each.key)
            time = each.self_device_time_total if self._is_gpu else each.self_cpu_time_total
            calls[name] += each.count / steps
            seconds[name] += time / (1e6 * steps)
        ordered = sorted(seconds, key=lambda name: -seconds[name])
        shown = [name for name in ordered if seconds[name] > 0]
        return tuple(
            OperatorTime(name, calls[name], seconds[name]) for name in shown[:_MOST_OPERATORS]
        )


def _name_of(key: str) -> str:
    """Return the name under which an operator, kernel or range is listed."""
    if key.startswith(_INDUCTOR):
        return COMPILED
    return STEP if key.startswith(f"{STEP} ") else key


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that is a range of the trace."""
    return record_function(name)


def spans_of(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches; waiting for each is a range of the trace."""
    while True:
        with span("data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def with_spans(built: Built) -> Built:
    """Return a build in which each call of a graph or an update is a range of the trace."""
    updates = set(built.update_names.values())

    def traced(graph: BuiltGraph) -> Call:
        call, name = graph.call, (UPDATE if graph.name in updates else GRAPH) + graph.name

        def spanned(*arguments: Tensor) -> Any:
            with span(name):
                return call(*arguments)

        return spanned

    return built.replaced(traced)
