"""Finds out whether what a training graph computes of a row depends on the other rows of the same call, as under batch norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from trainload.autograd_trace.derivation.step_check import arguments_of
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.parity.distance import noise_floor, relative_distance
from trainload.capture.parity.parity import tolerance_of
from trainload.capture.program import GraphCapture, Program

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_MARGIN = 30.0
"""Sums in another order differ by less than so many tolerances, and rows that depend on one another by more."""


def are_rows_coupled(program: Program, capture: GraphCapture, step: StepGraph, batch: Mapping[str, Tensor]) -> bool:
    """Return whether two calls, each on a half of a batch, come to another loss or gradient than one call on all of it.

    Then the result of training depends on the number of microbatches and ranks. Where the batch cannot be divided (one row, a fixed size, a
    half without weight, sizes that follow from the rows) nothing is found. What the first call writes to buffers the second one reads.

    Args:
        program: what `step` was derived from; its weights are read.
        capture: the training graph.
        step: its step graph, for the CPU.
        batch: an example, (rows, ...) tensors on the CPU.
    """
    rows = next(iter(batch.values())).shape[0]
    if rows < 2 or isinstance(capture.inputs[0].shape[0], int):
        return False
    return any(_differs(program, capture, step, each) for each in chain([batch], _beside(batch)))


def _beside(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield batches beside the example, on which rows may depend on one another that do not on the example, of zeros and ones say. A model
    need not take them.
    """
    generator = torch.Generator().manual_seed(0)
    floats = {n: _shaken(t, generator) if t.dtype in _FLOATS else t for n, t in batch.items()}
    yield {n: _drawn(t, generator) if t.dtype in _INTEGERS else t for n, t in floats.items()}
    if any(t.dtype in _FLOATS for t in floats.values()):
        yield floats


def _shaken(tensor: Tensor, generator: torch.Generator) -> Tensor:
    size = float(tensor.float().std()) if tensor.numel() > 1 else 0.0
    return tensor + torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * (size if 0 < size < torch.inf else 1.0)


def _drawn(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return entries of the tensor in other places; of one whose entries are all alike some become the number beside it."""
    if not tensor.numel():
        return tensor
    flat = tensor.flatten()
    if bool((flat != flat[0]).any()):
        return flat[torch.randint(len(flat), (len(flat),), generator=generator)].view(tensor.shape)
    beside = flat[0].logical_not() if tensor.dtype == torch.bool else flat[0] - 1 if flat[0] > 0 else flat[0] + 1
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.3, beside, tensor)


def _differs(program: Program, capture: GraphCapture, step: StepGraph, batch: Mapping[str, Tensor]) -> bool:
    """Return whether two calls come to something else than one; False where a batch or its halves cannot be computed, or to no numbers."""
    rows = next(iter(batch.values())).shape[0]
    middle = rows // 2
    try:
        first = _of_part(program, step, batch, 0, middle)
        written = {port.name: value for port, value in first.items() if port.role is Role.BUFFER}
        second = _of_part(replace(program, state={**program.state, **written}), step, batch, middle, rows)
        weights = [float(half[Port(Role.WEIGHT, "weight")]) for half in (first, second)]
        if not all(weights):
            return False
        together = _together(first, second, weights)
        del first, second
        whole = _of_part(program, step, batch, 0, rows)
    except (RuntimeError, IndexError):  # a half is not of a size that the graph takes, or a value is none that it takes
        return False
    if not all(bool(value.isfinite().all()) for port, value in whole.items() if port in together):
        return False
    gradients = [value for port, value in whole.items() if port.role is Role.GRADIENT]
    floor, allowed = noise_floor(gradients), _MARGIN * tolerance_of(capture)
    return any(relative_distance(whole[port], value, floor) > allowed for port, value in together.items())


def _of_part(program: Program, step: StepGraph, batch: Mapping[str, Tensor], start: int, stop: int) -> dict[Port, Tensor]:
    rows = next(iter(batch.values())).shape[0]
    part = {name: tensor[start:stop] for name, tensor in batch.items()}
    with torch.no_grad():
        results = step.module(*arguments_of(program, step, part, start, rows))
    return dict(zip(step.outputs, results, strict=True))


def _together(first: dict[Port, Tensor], second: dict[Port, Tensor], weights: list[float]) -> dict[Port, Tensor]:
    """Loss and gradients of two calls as a run takes them together. The gradients of the first are written to."""
    found: dict[Port, Tensor] = {}
    for port, value in first.items():
        if port.role is Role.GRADIENT:
            found[port] = value.add_(second[port]) if value.is_contiguous() else value + second[port]
        elif port.role is Role.LOSS:
            found[port] = ((value * weights[0] + second[port] * weights[1]) / sum(weights)).to(value.dtype)
    return found
