"""Proves a step graph equal to autograd on the program that it was derived from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainload.autograd_trace.aot import StepModule, trainable_parameters
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.distance import noise_floor, relative_distance
from trainload.capture.errors import CaptureError
from trainload.capture.parity import tolerance_of
from trainload.capture.program import GraphCapture, Program
from trainload.capture.replays import Check, replay_batches

_STEP = 3


def check_step(program: Program, name: str, step: StepGraph, batch: Mapping[str, Tensor]) -> None:
    """Runs a batch through the step graph, and through eager autograd with the same stateless random numbers; compares loss, metrics,
    buffers and every gradient. Where the number of rows is dynamic, another number is tried too: a derivative may have baked it in.

    Args:
        program: what `step` was derived from; its weights are read.
        name: of the training graph.
        step: its step graph, for the CPU.
        batch: an example, (rows, ...) tensors on the CPU; inputs of other graphs are left alone.

    Raises:
        CaptureError: something differs.
    """
    capture = program.graphs[name]
    for each in replay_batches(capture, {i.name: batch[i.name] for i in capture.inputs}, Check.USUAL):
        _check_batch(program, capture, step, each)


def _check_batch(program: Program, capture: GraphCapture, step: StepGraph, batch: Mapping[str, Tensor]) -> None:
    rows = next(iter(batch.values())).shape[0]
    scalars = {
        Role.SEED: torch.tensor(7), Role.STEP: torch.tensor(_STEP), Role.ROW: torch.tensor(rows), Role.SCALE: torch.tensor(1.0 / rows),
    }  # fmt: skip
    state = {name: program.state[name].clone() for name in program.state}
    module = StepModule(
        capture, state | dict(program.constants), trainable_parameters(program, capture), program.aliases, torch.device("cpu")
    )
    arguments = []
    for port in step.inputs:
        match port.role:
            case Role.PARAMETER:
                arguments.append(program.state[port.name])
            case Role.BUFFER:
                arguments.append(program.state[port.name].clone())
            case Role.CONSTANT:
                arguments.append(program.constants[port.name])
            case Role.BATCH:
                arguments.append(batch[port.name])
            case _:
                arguments.append(scalars[port.role])
    with torch.no_grad():
        try:
            results = step.module(*arguments)
        except RuntimeError as error:  # torch's kernels
            raise CaptureError(
                f"the joint graph fails on {rows} rows: {str(error).strip().splitlines()[0]}",
                where=f"graph {capture.name}",
                cure="The derivative of an operator of the model has the number of rows of the example in it: write it with other "
                "operators (x * mask in place of masked_select), or fix the size with dynamic={name: {0: Dim.STATIC}}.",
            ) from error
    *expected, objective = module(*(batch[i.name] for i in capture.inputs), *scalars.values())
    objective.backward()
    wanted = {(p.role, p.name): v for p, v in zip(module.output_ports(), expected, strict=True)}
    wanted |= {(Role.BUFFER, name): value for name, value in module.buffers_by_name().items()}
    gradients = {name: p.grad for name, p in module.parameters_by_name().items() if p.grad is not None}
    wanted |= {(Role.GRADIENT, name): value for name, value in gradients.items()}
    floor = noise_floor(gradients.values())
    found = {(p.role, p.name): v for p, v in zip(step.outputs, results, strict=True)}
    tolerance = tolerance_of(capture)
    for key, reference in wanted.items():
        if key not in found and key[0] is not Role.GRADIENT:
            continue  # a buffer that forward does not write
        distance = relative_distance(reference.detach(), found.get(key), floor)
        if not distance <= tolerance:
            raise CaptureError(
                f"the joint graph differs from autograd in the {key[0].value} {key[1]!r} on {rows} rows",
                where=f"graph {capture.name}",
                expected=f"a relative difference of at most {tolerance:g}",
                got=f"{distance:.2g}" if key in found else "no gradient",
                cure="This is a fault of trainload or of torch's AOT autograd for an operator of the model, not of the model.",
            )
