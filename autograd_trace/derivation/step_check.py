"""Check that a step graph equals autograd on the program that it was derived from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainload.autograd_trace.derivation.step_module import (
    StepModule,
    output_ports,
    trainable_parameters,
)
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.parity.distance import (
    digits_floor,
    noise_floor,
    norm_of,
    nudged,
    relative_distance,
    tolerance_for,
)
from trainload.capture.parity.float64 import Key, Reference, doubled, reference_of
from trainload.capture.parity.parity import tolerance_of
from trainload.capture.parity.replays import Check, Replayed, replay_batches
from trainload.capture.program import GraphCapture, Program
from trainload.core.errors import CaptureError, first_line

_STEP = 3


@dataclass(frozen=True, slots=True)
class _Reference:
    """Expected results of a step: outputs and buffers by role and name, and gradients, each still
    to be multiplied by `factor` (0-dim).
    """

    values: dict[tuple[Role, str], Tensor]
    gradients: dict[str, Tensor]
    factor: Tensor


def check_step(
    program: Program,
    name: str,
    step: StepGraph,
    batch: Mapping[str, Tensor],
    replays: Sequence[Replayed] = (),
) -> None:
    """Run a batch through the step graph and through eager autograd with the same stateless random
    numbers, and compare the results.

    Loss, metrics, buffers and every gradient are compared. If the number of rows is dynamic,
    another number is tried too, because a derivative may have baked it in.

    Args:
        program: the program that `step` was derived from; its weights are read.
        name: name of the training graph.
        step: its step graph, for the CPU.
        batch: an example, (rows, ...) tensors on the CPU; inputs of other graphs are ignored.
        replays: results of autograd on the same graph and state from the comparison with eager
            mode, which are not computed again.

    Raises:
        CaptureError: something differs.
    """
    capture = program.graphs[name]
    for example in replay_batches(
        capture, {i.name: batch[i.name] for i in capture.inputs}, Check.USUAL
    ):
        _check_batch(
            program,
            capture,
            step,
            example,
            next((replayed for replayed in replays if replayed.is_of(example)), None),
        )


def arguments_of(
    program: Program, step: StepGraph, batch: Mapping[str, Tensor], row: int, rows: int
) -> list[Tensor]:
    """Return the arguments with which a step graph is called for a comparison.

    Args:
        program: the program that the graph was derived from; its state is read.
        step: the graph.
        batch: (rows, ...) tensors on the CPU.
        row: number of the batch's first row, for random numbers.
        rows: divisor of the loss's gradient.
    """
    arguments, scalars = list[Tensor](), _scalars(row, rows)
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
    return arguments


def _scalars(row: int, rows: int) -> dict[Role, Tensor]:
    return {
        Role.SEED: torch.tensor(7),
        Role.STEP: torch.tensor(_STEP),
        Role.ROW: torch.tensor(row),
        Role.SCALE: torch.tensor(1.0 / rows),
    }


def _check_batch(
    program: Program,
    capture: GraphCapture,
    step: StepGraph,
    batch: Mapping[str, Tensor],
    replayed: Replayed | None,
) -> None:
    rows = next(iter(batch.values())).shape[0]
    scalars = _scalars(rows, rows)
    arguments = arguments_of(program, step, batch, rows, rows)
    with torch.no_grad():
        try:
            results = step.module(*arguments)
        except RuntimeError as error:  # raised by torch's kernels
            raise CaptureError(
                f"the joint graph fails on {rows} rows: {first_line(error)}",
                where=f"graph {capture.name}",
                hint=(
                    "The derivative of an operator of the model depends on the example's number of"
                    " rows: use other operators (x * mask instead of masked_select), or fix the"
                    " size with dynamic={name: {0: Dim.STATIC}}."
                ),
            ) from error
    computed = {(p.role, p.name): v for p, v in zip(step.outputs, results, strict=True)}
    state = {name: program.state[name] for name in program.state} | dict(program.constants)
    if replayed is None:
        expected = _by_autograd(program, capture, batch, scalars, state)
    else:
        expected = _from_replay(program, capture, replayed, scalars[Role.SCALE])
    factor = float(expected.factor.abs())
    floor, total = (
        noise_floor(expected.gradients.values()) * factor,
        norm_of(expected.gradients.values()) * factor,
    )
    tolerance = tolerance_of(capture)
    moved: _Reference | None = None

    @functools.cache
    def exact() -> Reference | None:
        def call(twin: GraphCapture) -> dict[Key, Tensor | None]:
            precise = _by_autograd(program, twin, doubled(batch), scalars, doubled(state))
            values: dict[Key, Tensor | None] = {
                key: value.detach() for key, value in precise.values.items()
            }
            return values | {
                (Role.GRADIENT, name): gradient for name, gradient in precise.gradients.items()
            }

        gradients: dict[Key, Tensor | None] = {
            (Role.GRADIENT, name): g * expected.factor.to(g.dtype)
            for name, g in expected.gradients.items()
        }
        return reference_of(capture, call, gradients)

    for key in (*expected.values, *((Role.GRADIENT, name) for name in expected.gradients)):
        if key[0] is Role.GRADIENT:
            gradient = expected.gradients[key[1]]
            reference = gradient * expected.factor.to(gradient.dtype)
        elif key in computed:
            reference = expected.values[key].detach()
        else:
            continue  # a buffer that forward does not write to
        distance = relative_distance(reference, computed.get(key), floor)
        allowed = tolerance_for(reference, tolerance) if key[0] is Role.GRADIENT else tolerance
        # A bias before a softmax, for example, has a gradient that is only rounding error, and the
        # joint graph rounds differently from autograd. So a gradient that differs is measured
        # against how far it moves when the weights change in their last bit.
        if not distance <= allowed and key[0] is Role.GRADIENT and key in computed:
            moved = moved or _by_autograd(program, capture, batch, scalars, nudged(state))
            other = moved.gradients[key[1]] * expected.factor.to(reference.dtype)
            distance = relative_distance(
                reference, computed[key], digits_floor(reference, other, tolerance, total)
            )
        if not distance <= allowed and not (
            (precise := exact()) is not None
            and precise.allows(key, reference, computed.get(key), floor)
        ):
            raise CaptureError(
                f"the joint graph differs from autograd in the {key[0].value} {key[1]!r} on {rows}"
                " rows",
                where=f"graph {capture.name}",
                expected=f"a relative difference of at most {allowed:g}",
                got=f"{distance:.2g}" if key in computed else "no gradient",
                hint=(
                    "This is a bug in trainload or in torch's AOT autograd for an operator of the"
                    " model, not in the model."
                ),
            )


def _by_autograd(
    program: Program,
    capture: GraphCapture,
    batch: Mapping[str, Tensor],
    scalars: Mapping[Role, Tensor],
    state: Mapping[str, Tensor],
) -> _Reference:
    """Return the results of the captured graph, interpreted with stateless random numbers, and its
    gradients by backward().
    """
    own = {**state, **{buffer.name: state[buffer.name].clone() for buffer in program.buffers}}
    module = StepModule(
        capture, own, trainable_parameters(program, capture), program.aliases, torch.device("cpu")
    )
    *expected, objective = module(*(batch[i.name] for i in capture.inputs), *scalars.values())
    objective.backward()
    values = {(p.role, p.name): v for p, v in zip(module.output_ports(), expected, strict=True)}
    values |= {(Role.BUFFER, name): value for name, value in module.buffers_by_name().items()}
    gradients = {
        name: p.grad for name, p in module.parameters_by_name().items() if p.grad is not None
    }
    return _Reference(values, gradients, torch.tensor(1.0))


def _from_replay(
    program: Program, capture: GraphCapture, replayed: Replayed, scale: Tensor
) -> _Reference:
    """Return the same from results that autograd computed before.

    They drew no random numbers and wrote no buffers; their gradients are those of the plain loss.
    """
    outputs, ports = list(replayed.outputs), output_ports(capture)
    if len(ports) > len(outputs):
        outputs.append(torch.tensor(float(next(iter(replayed.batch.values())).shape[0])))
    values = {(port.role, port.name): value for port, value in zip(ports, outputs, strict=True)}
    weight = values[Role.WEIGHT, "weight"].to(torch.float32)
    values |= {(Role.WEIGHT, "weight"): weight} | {
        (Role.BUFFER, buffer.name): program.state[buffer.name] for buffer in program.buffers
    }
    trainable = trainable_parameters(program, capture)
    gradients = {
        name: gradient
        for name, gradient in replayed.gradients.items()
        if gradient is not None and name in trainable
    }
    return _Reference(values, gradients, weight * scale)
