"""Record the calls of a compiled graph as CUDA graphs, so that a call is one launch.

A small model's kernels take less time than the host needs to launch them one by one. A recording
holds all kernels of a call with their arguments, so it is made for one shape of the inputs and one
place of each in memory: values that are elsewhere are copied there before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainload.core.errors import CompileError, raised

_CALLS_BEFORE = 2
"""Calls with a shape before its recording: the first ones tune and compare kernels."""
MOST_SHAPES = 8
"""Shapes that are recorded of one graph; calls with others are not. Each recording has memory of
its own for its results.
"""

_Key = tuple[tuple[Any, ...], ...]


class Pool:
    """Memory that recordings share, since they are replayed one after the other.

    A replay may overwrite what later recordings have left there.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class Recorded:
    """A function over tensors of a GPU whose calls are recorded, and then replayed.

    Args:
        name: its name, for errors.
        call: the function. It does not write to its arguments.
        is_read_at_once: for each result, True if nothing reads it after the next replay of a
            recording in the pool has begun and copied its inputs. The others are copied.
        pool: memory of the recordings.

    Raises:
        CompileError: (on a call) the function does something that cannot be recorded.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Sequence[Tensor]],
        is_read_at_once: Sequence[bool],
        pool: Pool,
    ) -> None:
        self._name, self._call, self._pool = name, call, pool
        self._in_place = is_read_at_once
        self._calls: dict[_Key, int] = {}
        self._recordings: dict[_Key, _Recording] = {}

    def __call__(self, *values: Tensor) -> Sequence[Tensor]:
        key = tuple((*value.shape, *value.stride(), value.dtype) for value in values)
        recording = self._recordings.get(key)
        if recording is None:
            count = self._calls[key] = self._calls.get(key, 0) + 1
            if count <= _CALLS_BEFORE or len(self._recordings) == MOST_SHAPES:
                return self._call(*values)
            recording = self._recordings[key] = self._record(values)
        for place, value in zip(recording.inputs, values, strict=True):
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        recording.graph.replay()
        return [
            result if in_place else result.clone()
            for result, in_place in zip(recording.outputs, self._in_place, strict=True)
        ]

    def _record(self, values: Sequence[Tensor]) -> _Recording:
        """Record a call, without executing it."""
        graph = torch.cuda.CUDAGraph()
        operators = _Operators()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        try:
            # other threads, such as those of NCCL, are not disturbed
            with (
                torch.cuda.graph(graph, pool=self._pool.handle, capture_error_mode="thread_local"),
                operators,
            ):
                outputs = self._call(*values)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CompileError(
                f"{operators.last} cannot be part of a CUDA graph",
                where=self._name,
                got=raised(error),
                hint="Leave cuda_graphs at false.",
            ) from error
        return _Recording(graph, values, outputs)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that knows the last operator that was called."""

    last = "its beginning"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.last = str(func)
        return func(*args, **(kwargs or {}))
