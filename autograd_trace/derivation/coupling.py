"""Detect whether the results of a training graph for a row depend on the other rows of the same
call, as under batch norm.
"""

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
"""Number of tolerances that separates rounding (sums in another order) from a dependence between
rows.
"""


def are_rows_coupled(
    program: Program, capture: GraphCapture, step: StepGraph, batch: Mapping[str, Tensor]
) -> bool:
    """Return True if two calls, each on a half of a batch, yield another loss or gradient than one
    call on all of it.

    Then the result of training depends on the number of microbatches and ranks. If the batch cannot
    be divided (one row, a fixed size, a half without weight, sizes that follow from the rows), the
    result is False. The second call reads what the first one wrote to buffers.

    Args:
        program: the program that `step` was derived from; its weights are read.
        capture: the training graph.
        step: its step graph, for the CPU.
        batch: an example, (rows, ...) tensors on the CPU.
    """
    rows = next(iter(batch.values())).shape[0]
    if rows < 2 or isinstance(capture.inputs[0].shape[0], int):
        return False
    return any(
        _is_different_in_halves(program, capture, step, example)
        for example in chain([batch], _variations(batch))
    )


def _variations(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield variations of the example, which may show a dependence between rows that the example
    (of zeros and ones, say) does not show.

    The model need not accept them.
    """
    generator = torch.Generator().manual_seed(0)
    floats = {n: _add_noise(t, generator) if t.dtype in _FLOATS else t for n, t in batch.items()}
    yield {n: _rearrange(t, generator) if t.dtype in _INTEGERS else t for n, t in floats.items()}
    if any(t.dtype in _FLOATS for t in floats.values()):
        yield floats


def _add_noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    size = float(tensor.float().std()) if tensor.numel() > 1 else 0.0
    return tensor + torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * (
        size if 0 < size < torch.inf else 1.0
    )


def _rearrange(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return entries of the tensor in other places; if all entries are equal, change some to the
    adjacent number.
    """
    if not tensor.numel():
        return tensor
    flat = tensor.flatten()
    if bool((flat != flat[0]).any()):
        return flat[torch.randint(len(flat), (len(flat),), generator=generator)].view(tensor.shape)
    beside = (
        flat[0].logical_not()
        if tensor.dtype == torch.bool
        else flat[0] - 1
        if flat[0] > 0
        else flat[0] + 1
    )
    return torch.where(torch.rand(tensor.shape, generator=generator) < 0.3, beside, tensor)


def _is_different_in_halves(
    program: Program, capture: GraphCapture, step: StepGraph, batch: Mapping[str, Tensor]
) -> bool:
    """Return True if two calls yield another result than one.

    The result is False if a batch or its halves cannot be computed or do not yield finite numbers.
    """
    rows = next(iter(batch.values())).shape[0]
    middle = rows // 2
    try:
        first = _run_part(program, step, batch, 0, middle)
        written = {port.name: value for port, value in first.items() if port.role is Role.BUFFER}
        second = _run_part(
            replace(program, state={**program.state, **written}), step, batch, middle, rows
        )
        weights = [float(half[Port(Role.WEIGHT, "weight")]) for half in (first, second)]
        if not all(weights):
            return False
        together = _combine(first, second, weights)
        del first, second
        whole = _run_part(program, step, batch, 0, rows)
    except (RuntimeError, IndexError):
        # the graph does not accept a half's size, or one of its values
        return False
    if not all(bool(value.isfinite().all()) for port, value in whole.items() if port in together):
        return False
    gradients = [value for port, value in whole.items() if port.role is Role.GRADIENT]
    floor, allowed = noise_floor(gradients), _MARGIN * tolerance_of(capture)
    return any(
        relative_distance(whole[port], value, floor) > allowed for port, value in together.items()
    )


def _run_part(
    program: Program, step: StepGraph, batch: Mapping[str, Tensor], start: int, stop: int
) -> dict[Port, Tensor]:
    rows = next(iter(batch.values())).shape[0]
    part = {name: tensor[start:stop] for name, tensor in batch.items()}
    with torch.no_grad():
        results = step.module(*arguments_of(program, step, part, start, rows))
    return dict(zip(step.outputs, results, strict=True))


def _combine(
    first: dict[Port, Tensor], second: dict[Port, Tensor], weights: list[float]
) -> dict[Port, Tensor]:
    """Return loss and gradients of two calls, combined as a run combines them. The first call's
    gradients are written to.
    """
    combined: dict[Port, Tensor] = {}
    for port, value in first.items():
        if port.role is Role.GRADIENT:
            combined[port] = (
                value.add_(second[port]) if value.is_contiguous() else value + second[port]
            )
        elif port.role is Role.LOSS:
            combined[port] = ((value * weights[0] + second[port] * weights[1]) / sum(weights)).to(
                value.dtype
            )
    return combined
