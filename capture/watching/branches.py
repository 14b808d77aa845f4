"""torch.cond with branches that write to buffers, as batch norm does.

torch rejects it in training, even in eager mode.

In eager mode the branch is chosen by a Python `if`. In a graph each branch has copies of the
buffers, writes to the copies, and returns them after its results; those that the chosen branch
returns are copied into the buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainload.capture.source.patched import renamed
from trainload.capture.source.source_place import place_here
from trainload.capture.watching import marks
from trainload.capture.watching.nest import mapped
from trainload.capture.watching.recorder import Recorder
from trainload.core.errors import CaptureError

Branch = Callable[..., Any]
_ORIGINAL = (torch.cond,)
"""A tuple, so that the replacement by name does not reach it."""
_OF_WRITES = ("input mutation", "Mutating a variable", "buffer_assignment")
"""Parts of torch's messages about a branch that writes to a tensor.

The last one is about a branch that assigns a buffer.
"""
_TRACED: ContextVar[tuple[Recorder, nn.Module] | None] = ContextVar("_TRACED", default=None)


@contextlib.contextmanager
def branches_may_write() -> Iterator[None]:
    """Make torch.cond accept branches that write to buffers, inside the block."""
    with renamed({_ORIGINAL[0]: _cond}):
        yield


@contextlib.contextmanager
def traced_by(watch: Recorder, model: nn.Module) -> Iterator[None]:
    """Trace calls of torch.cond with writing branches into the graph of `watch`."""
    token = _TRACED.set((watch, model))
    try:
        yield
    finally:
        _TRACED.reset(token)


def _cond(pred: Any, true_fn: Branch, false_fn: Branch, operands: Sequence[Any] = ()) -> Any:
    """Call torch.cond, or its replacement if torch rejects a branch that writes to a buffer."""
    try:
        return _ORIGINAL[0](pred, true_fn, false_fn, tuple(operands))
    except RuntimeError as error:
        if not isinstance(pred, Tensor) or not any(words in str(error) for words in _OF_WRITES):
            raise
    traced = _TRACED.get()
    if traced is None:
        return (true_fn if pred else false_fn)(*operands)
    return _trace_branches(*traced, pred, (true_fn, false_fn), operands)


def _trace_branches(
    watch: Recorder,
    model: nn.Module,
    pred: Tensor,
    branches: Sequence[Branch],
    operands: Sequence[Any],
) -> Any:
    buffers = list({id(value): value for value in model.buffers()}.values())
    # backward runs a branch again, after the buffers have been written to
    before = [value.clone() for value in buffers]
    traced = [_TracedBranch(watch, model, buffers, before, branch, operands) for branch in branches]
    changed = sorted(traced[0].used | traced[1].used)
    values = [
        [*branch_region.values, *(branch_region.buffers[place] for place in changed)]
        for branch_region in traced
    ]
    kinds = [[(tuple(value.shape), value.dtype) for value in tensors] for tensors in values]
    if kinds[0] != kinds[1]:
        raise CaptureError(
            "the branches of a torch.cond return different kinds of tensors",
            where=str(place_here()),
            expected=", ".join(f"{dtype} {shape}" for shape, dtype in kinds[0]),
            got=", ".join(f"{dtype} {shape}" for shape, dtype in kinds[1]),
            hint="Return tensors of the same shapes and dtypes from both branches.",
        )
    outputs = iter(
        marks.BRANCHES(pred, *values, *(branch_region.number for branch_region in traced))
    )
    result = mapped(traced[0].result, lambda x: _as_before(next(outputs), x.dtype))
    for place in changed:
        buffers[place].copy_(_as_before(next(outputs).detach(), buffers[place].dtype))
    return result


def _as_floats(x: Tensor) -> Tensor:
    """Convert integers to floating point; int64 keeps its bits.

    torch differentiates everything that a branch returns, and fails on integers such as batch
    norm's counter of batches.
    """
    if x.is_floating_point() or x.is_complex():
        return x
    return x.view(torch.float64) if x.dtype is torch.int64 else x.to(torch.float64)


def _as_before(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `_as_floats`."""
    return x if x.dtype is dtype else x.view(dtype) if dtype is torch.int64 else x.to(dtype)


class _TracedBranch:
    """A branch that was traced as a region of the graph.

    Attributes:
        number: number of the region.
        result: return value of the branch.
        values: tensors in `result`, converted by `_as_floats`.
        buffers: the model's buffers after the branch, converted by `_as_floats`.
        used: indices of the buffers that the branch reads or writes.
    """

    def __init__(
        self,
        watch: Recorder,
        model: nn.Module,
        buffers: Sequence[Tensor],
        before: Sequence[Tensor],
        branch: Branch,
        operands: Sequence[Any],
    ) -> None:
        self.number = watch.region("branch")
        copies = [value.clone() for value in before]
        own = {id(value): copy for value, copy in zip(buffers, copies, strict=True)}
        places = {id(copy): place for place, copy in enumerate(copies)}
        with _Uses(places) as uses, _buffers_replaced(model, own) as replaced_buffers:
            self.result = mapped(
                branch(*mapped(operands, lambda x: own.get(id(x), x))), torch.clone
            )
            now = [
                (places[id(copy)], copy, module._buffers[name])
                for module, name, copy in replaced_buffers
            ]
            assigned = {
                place: value
                for place, copy, value in now
                if value is not None and value is not copy
            }
        self.values: list[Tensor] = []
        mapped(self.result, lambda x: self.values.append(_as_floats(x)))
        self.buffers = [_as_floats(assigned.get(place, copy)) for place, copy in enumerate(copies)]
        self.used = uses.used | assigned.keys()
        marks.END(self.number)


@contextlib.contextmanager
def _buffers_replaced(
    model: nn.Module, own: Mapping[int, Tensor]
) -> Iterator[list[tuple[nn.Module, str, Tensor]]]:
    """Replace the model's buffers inside the block.

    Args:
        model: the model.
        own: id of a buffer -> its replacement.

    Yields:
        (module, buffer name, replacement) for each replaced buffer.
    """
    before = [
        (m, name, value)
        for m in model.modules()
        for name, value in m._buffers.items()
        if value is not None and id(value) in own
    ]
    for module, name, value in before:
        module._buffers[name] = own[id(value)]
    try:
        yield [(module, name, own[id(value)]) for module, name, value in before]
    finally:
        for module, name, value in before:
            module._buffers[name] = value


class _Uses(TorchFunctionMode):
    """Mode that records which tensors are passed to functions of torch.

    Args:
        places: id of a tensor -> index that is recorded for it.
    """

    def __init__(self, places: Mapping[int, int]) -> None:
        super().__init__()
        self._places = places
        self.used: set[int] = set()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def note(x: Tensor) -> None:
            if id(x) in self._places:
                self.used.add(self._places[id(x)])

        mapped([*args, *(kwargs or {}).values()], note)
        return func(*args, **(kwargs or {}))
