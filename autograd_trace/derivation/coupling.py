"""Detect whether the results of a training graph for a row depend on the other rows of the same
call, as under batch norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from trainload.autograd_trace.derivation.step_check import arguments_of
from trainload.autograd_trace.derivation.streamed_results import Receive, ResultStream
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.job.stored_tensors import StoredTensors
from trainload.capture.parity.distance import noise_floor, norm_of, relative_distance
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
    stream = ResultStream(step)
    return any(
        _is_different_in_halves(program, capture, stream, example)
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
    program: Program, capture: GraphCapture, stream: ResultStream, batch: Mapping[str, Tensor]
) -> bool:
    """Return True if two calls yield another result than one.

    The result is False if a batch or its halves cannot be computed or do not yield finite numbers.
    """
    rows = next(iter(batch.values())).shape[0]
    middle = rows // 2
    halves = _Halves()
    differences: list[float] = []
    are_finite = True

    def compare(port: Port, value: Tensor) -> None:
        nonlocal are_finite
        if port.role not in (Role.GRADIENT, Role.LOSS):
            return
        are_finite = are_finite and bool(value.isfinite().all())
        together = halves.gradients[port.name] if port.role is Role.GRADIENT else halves.loss()
        differences.append(relative_distance(together, value, floor))

    try:
        _run_part(program, stream, batch, range(middle), partial(halves.receive, 0))
        after = replace(program, state={**program.state, **halves.written()})
        _run_part(after, stream, batch, range(middle, rows), partial(halves.receive, 1))
        if not all(halves.weights()):
            return False
        floor = noise_floor(norm_of(halves.gradients.values()))
        _run_part(program, stream, batch, range(rows), compare)
    except (RuntimeError, IndexError):
        # the graph does not accept a half's size, or one of its values
        return False
    allowed = _MARGIN * tolerance_of(capture)
    return are_finite and any(difference > allowed for difference in differences)


def _run_part(
    program: Program,
    stream: ResultStream,
    batch: Mapping[str, Tensor],
    part: range,
    receive: Receive,
) -> None:
    rows = next(iter(batch.values())).shape[0]
    taken = {name: tensor[part.start : part.stop] for name, tensor in batch.items()}
    stream.stream(arguments_of(program, stream.step, taken, part.start, rows), receive)


class _Halves:
    """Results of two calls, and their gradients combined as a run combines them."""

    def __init__(self) -> None:
        self.gradients = StoredTensors()
        self._values: tuple[dict[Port, Tensor], dict[Port, Tensor]] = ({}, {})

    def receive(self, half: int, port: Port, value: Tensor) -> None:
        """Receive a result of the first (0) or second (1) call."""
        if port.role is Role.GRADIENT:
            self.gradients.add(port.name, value)
        else:
            self._values[half][port] = value

    def written(self) -> dict[str, Tensor]:
        """Return the buffers that the first call wrote, by name."""
        return {
            port.name: value for port, value in self._values[0].items() if port.role is Role.BUFFER
        }

    def weights(self) -> list[float]:
        return [float(half[Port(Role.WEIGHT, "weight")]) for half in self._values]

    def loss(self) -> Tensor:
        """Return the mean of both losses."""
        weights = self.weights()
        first, second = (
            value for half in self._values for port, value in half.items() if port.role is Role.LOSS
        )
        mean = (first * weights[0] + second * weights[1]) / sum(weights)
        return mean.to(first.dtype)
