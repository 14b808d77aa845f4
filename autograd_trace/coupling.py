"""Finds out whether what a training graph computes of a row depends on the other rows of the same call, as under batch norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainload.autograd_trace.check import arguments_of
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.distance import noise_floor, relative_distance
from trainload.capture.parity import tolerance_of
from trainload.capture.program import GraphCapture, Program

_MARGIN = 30.0
"""Sums in another order differ by less than so many tolerances, and rows that depend on one another by more."""


def are_rows_coupled(program: Program, capture: GraphCapture, step: StepGraph, batch: Mapping[str, Tensor]) -> bool:
    """Return whether two calls, each on a half of a batch, come to another loss or gradient than one call on all of it.

    Then the result of training depends on the number of microbatches and ranks. Where the batch cannot be divided (one row, a fixed size, a
    half without weight, sizes that follow from the rows) nothing is found.

    Args:
        program: what `step` was derived from; its weights are read.
        capture: the training graph.
        step: its step graph, for the CPU.
        batch: an example, (rows, ...) tensors on the CPU.
    """
    rows = next(iter(batch.values())).shape[0]
    if rows < 2 or isinstance(capture.inputs[0].shape[0], int):
        return False
    middle = rows // 2
    try:
        halves = _of_part(program, step, batch, 0, middle), _of_part(program, step, batch, middle, rows)
    except RuntimeError:  # a half is not of a size that the graph takes
        return False
    weights = [float(half[Port(Role.WEIGHT, "weight")]) for half in halves]
    if not all(weights):
        return False
    together = _together(*halves, weights)
    del halves
    whole = _of_part(program, step, batch, 0, rows)
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
