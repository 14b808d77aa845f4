"""Measure how long a rank waits for other ranks in its collectives.

A rank that is slower than the others waits least: they all take equally long for a step.

Tested with torch 2.13.0. Private names used: `torch._C.DispatchKey`, `torch._C.DispatchKeySet`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

_WAIT = torch.ops._c10d_functional.wait_tensor
_TORCHS = DispatchKeySet(DispatchKey.CompositeExplicitAutograd)


class WaitTime:
    """Time for which the collectives of graphs have made this rank wait."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._on_device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the waits of the graphs that are called within the context.

        Of several objects, the one whose context is entered last measures.
        """
        _kernels()
        _measuring.append(self)
        try:
            yield
        finally:
            _measuring.remove(self)

    def taken(self) -> float:
        """Return the seconds since the last call. The device must have done its work."""
        seconds, self._seconds = self._seconds, 0.0
        pending, self._on_device = self._on_device, []
        for before, after in pending:
            seconds += float(before.elapsed_time(after)) / 1000
        return seconds

    def wait(self, value: Tensor) -> Tensor:
        """Wait for a collective, and measure how long, unless it is part of a CUDA graph."""
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return _torchs_wait(value)  # recorded, and done later
        if value.is_cuda:  # the host goes on, and the stream waits
            before, after = _event(), _event()
            before.record()
            result = _torchs_wait(value)
            after.record()
            self._on_device.append((before, after))
            return result
        began = time.perf_counter()
        result = _torchs_wait(value)
        self._seconds += time.perf_counter() - began
        return result


_measuring: list[WaitTime] = []


def _wait(value: Tensor) -> Tensor:
    return _measuring[-1].wait(value) if _measuring else _torchs_wait(value)


def _torchs_wait(value: Tensor) -> Tensor:
    result: Tensor = _WAIT.default.redispatch(_TORCHS, value)
    return result


@functools.cache
def _kernels() -> torch.library.Library:
    """Register kernels that measure, before those that torch has for all devices.

    They stay until this process ends, so that the operator is the same for whoever looks at it.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        library.impl("wait_tensor", _wait, key)  # type: ignore[no-untyped-call]
    return library


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
