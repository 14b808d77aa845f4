"""Trace of the steps of a rank as they run, by torch.profiler."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from trainload.launching.node.built_graphs import Built, BuiltGraph, Call

_LOG_LEVEL = "KINETO_LOG_LEVEL"
STEP = "step"
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
        """Write the trace in Chrome's format, compressed."""
        plain = path.with_name(f"{path.name}.json")
        self._profiler.export_chrome_trace(str(plain))
        # torch compresses line by line, which takes several times as long
        with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()


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
