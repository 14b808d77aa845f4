"""Capture one update of an optimizer as graphs: of a flat tensor of any length, or of a whole
parameter of one shape.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trainload.autograd_trace.graphs import StateSpec, UpdateGraph
from trainload.autograd_trace.optimizer.bound_optimizer import bound
from trainload.autograd_trace.optimizer.optimizer_state import StateNames, state_names
from trainload.autograd_trace.optimizer.python_numbers import (
    as_number,
    numbers_stay_tensors,
    standing_for_number,
)
from trainload.autograd_trace.optimizer.value_branches import Decide, Results, Ways
from trainload.capture.source.quiet import quiet_torch
from trainload.core.errors import CaptureError, first_line

EXAMPLE = 64
"""Number of elements of the flat tensor that an update is traced on."""
_CHECKED_ELEMENTS = 2**16
"""Approximate limit for comparisons: an update of a larger parameter is compared on one of the same
proportions and about this size.
"""
_STEPS, _STEPS_OF_BRANCHES = 3, 12


def capture_update(
    name: str,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
) -> tuple[UpdateGraph, int]:
    """Capture an update over flat tensors of any length (`shape` is None) or over whole parameters
    of one shape.

    Returns:
        The update, and the number of steps after which to compare it with the optimizer's own. An
        update that branches needs more steps, because it may branch on the step's number.

    Raises:
        CaptureError: the step is not a function of (parameter, gradient, state, learning rate) that
            can be captured.
    """
    names = state_names(
        optimizer, group, dtype, (EXAMPLE,) if shape is None else checked_shape(shape)
    )
    param, grad = (
        torch.zeros((EXAMPLE,) if shape is None else shape, dtype=dtype) for _ in range(2)
    )
    rate = torch.tensor(float(group["lr"]))
    first = _export(
        name,
        _Update(optimizer, group, names, first=True),
        (param, grad, rate, ()),
        flat=shape is None,
    )
    output = next(n for n in first.graph.nodes if n.op == "output")
    new, *state_values = (n.meta["val"] for n in output.args[0])
    specs = _state_specs(names, new, state_values, type(optimizer).__name__, flat=shape is None)
    state = tuple(
        torch.zeros(param.shape if s.like_parameter else s.shape, dtype=getattr(torch, s.dtype))
        for s in specs
    )
    later = _Update(optimizer, group, names, first=False)
    following = _export(name, later, (param, grad, rate, state), flat=shape is None)
    for graph in (first, following):
        _check_constants(graph, optimizer, name)
    return UpdateGraph(name, first, following, specs, shape), (
        _STEPS if later.ways.count == 1 else _STEPS_OF_BRANCHES
    )


def checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape on which an update of a parameter of `shape` is compared: the same
    proportions, but not too large.
    """
    elements = torch.Size(shape).numel()
    factor = (
        (elements / _CHECKED_ELEMENTS) ** (1 / len(shape)) if elements > _CHECKED_ELEMENTS else 1
    )
    return shape if factor == 1 else tuple(max(1, int(size / factor)) for size in shape)


class _Update(nn.Module):
    """One call of an optimizer's step on one tensor. `names`: the names of its state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        names: StateNames,
        *,
        first: bool,
    ) -> None:
        super().__init__()
        self._parts = (optimizer, group)
        self._names = names
        self._first = first
        self.ways = Ways()

    def forward(
        self, param: Tensor, grad: Tensor, lr: Tensor, state: tuple[Tensor, ...]
    ) -> Results:
        return self.ways.results(lambda decide: self._step(decide, param, grad, lr, state))

    def _step(
        self, decide: Decide, param: Tensor, grad: Tensor, lr: Tensor, state: tuple[Tensor, ...]
    ) -> Results:
        param = param.clone()
        optimizer = bound(*self._parts, [param], lr)
        if not isinstance(self._parts[1]["lr"], Tensor):
            standing_for_number(optimizer.param_groups[0]["lr"])
        if not self._first:
            values = {
                name: value.clone() for name, value in zip(self._names.entries, state, strict=True)
            }
            self._names.give(
                optimizer,
                param,
                [
                    standing_for_number(v) if n in self._names.numbers else v
                    for n, v in values.items()
                ],
            )
        param.grad = grad.clone()
        with numbers_stay_tensors(decide):
            optimizer.step()
        return (
            param,
            *(
                v if isinstance(v, Tensor) else as_number(v)
                for v in self._names.of(optimizer, param)
            ),
        )


def _state_specs(
    names: StateNames, param: Tensor, state: Sequence[Tensor], kind: str, *, flat: bool
) -> tuple[StateSpec, ...]:
    """Return the spec of each state entry after the update. `param` and `state` are traced values,
    so sizes are compared as text.
    """
    specs = []
    of_parameter = tuple(map(str, param.shape))
    for entry, value in zip(names.entries, state, strict=True):
        sizes = tuple(map(str, value.shape))
        like_parameter = value.ndim > 0 and sizes == of_parameter
        where = f"{kind} state {entry!r}"
        if flat and value.ndim > 0 and not like_parameter:
            raise CaptureError(
                "an optimizer state has a different shape from its parameter, so the update cannot"
                " run on slices",
                where=where,
                expected="the parameter's shape or 0 dims",
                got=str(tuple(value.shape)),
            )
        if not like_parameter and not all(size.isdigit() for size in sizes):
            raise CaptureError(
                "the size of an optimizer state depends on values",
                where=where,
                expected="the same number of elements at every step",
                got=str(tuple(value.shape)),
                hint="Keep a mask of the parameter's shape instead of indices.",
            )
        others = () if like_parameter else tuple(value.shape)
        specs.append(
            StateSpec(entry, str(value.dtype).removeprefix("torch."), like_parameter, others)
        )
    return tuple(specs)


def _export(name: str, update: _Update, args: tuple[Any, ...], *, flat: bool) -> ExportedProgram:
    length = Dim("length", min=1)
    shapes = (
        ({0: length}, {0: length}, None, tuple({0: length} if s.ndim else None for s in args[3]))
        if flat
        else None
    )
    try:
        with quiet_torch(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.export(update, args, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        # an optimizer's own code may raise anything; all of it becomes one line
        raise CaptureError(
            f"the update of {type(update._parts[0]).__name__} cannot be captured:"
            f" {first_line(error)}",
            where=_source_line(error, update._parts[0]) or f"Job.optimizer: {name}",
            hint=_hint_for(update._parts[0]),
        ) from error


def _hint_for(optimizer: torch.optim.Optimizer) -> str:
    options = [
        name for name, value in optimizer.param_groups[0].items() if isinstance(value, Tensor)
    ]
    if options:
        return (
            f"Pass {', '.join(options)} as a number: {type(optimizer).__name__} converts a tensor"
            " to a number in its step()."
        )
    return (
        "Its step() must use tensor operators on the parameter, the gradient and the state;"
        " arithmetic with their .item() is allowed."
    )


def _source_line(error: BaseException | None, optimizer: torch.optim.Optimizer) -> str:
    """Return the line of the optimizer's own file at which an error was raised, "" if it was raised
    elsewhere.
    """
    file = inspect.getfile(type(optimizer))
    while error is not None:
        lines = [
            number
            for frame, number in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == file
        ]
        if lines:
            return f"{file}:{lines[-1]}"
        error = error.__cause__ or error.__context__
    return ""


def _check_constants(
    exported: ExportedProgram, optimizer: torch.optim.Optimizer, name: str
) -> None:
    for value in exported.constants.values():
        if not isinstance(value, Tensor) or value.numel() > 1:
            raise CaptureError(
                "the update reads a tensor that is neither an option nor part of its state",
                where=f"{type(optimizer).__name__}, {name}",
                expected="constants of at most one element",
                got=str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__,
                hint="Keep it in self.state[param].",
            )
