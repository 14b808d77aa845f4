"""Measure how long a rank waits for other ranks in a step.

A rank that is slower than the others waits least: they all take equally long for a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_WAIT = torch.ops._c10d_functional.wait_tensor


class WaitTime:
    """Time for which the collectives of graphs have made this rank wait."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._on_device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the waits of the graphs that are called within the context.

        Graphs look up the operator at each call, and find one that measures.
        """
        waiting = _WAIT.default

        def wait(value: Tensor) -> Tensor:
            if value.is_cuda:  # the host goes on, and the stream waits
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                result: Tensor = waiting(value)
                after.record()
                self._on_device.append((before, after))
                return result
            began = time.perf_counter()
            result = waiting(value)
            self._seconds += time.perf_counter() - began
            return result

        _WAIT.default = wait
        try:
            yield
        finally:
            _WAIT.default = waiting

    def taken(self) -> float:
        """Return the seconds since the last call. The device must have done its work."""
        seconds, self._seconds = self._seconds, 0.0
        pending, self._on_device = self._on_device, []
        return seconds + sum(before.elapsed_time(after) for before, after in pending) / 1000
