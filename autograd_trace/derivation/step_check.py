"""Check that a step graph equals autograd on the program that it was derived from."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainload.autograd_trace.derivation.step_module import StepModule, trainable_parameters
from trainload.autograd_trace.derivation.streamed_results import ResultStream
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.job.stored_tensors import StoredTensors
from trainload.capture.parity.backward_passes import store_gradients
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
from trainload.capture.parity.replays import Check, replay_batches
from trainload.capture.program import GraphCapture, Program
from trainload.core.errors import CaptureError, first_line

_STEP = 3


_Key = tuple[Role, str]
"""Role and name of a result."""


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of a step: outputs and buffers, and the gradients of the parameters that have one."""

    values: Mapping[_Key, Tensor]
    gradients: StoredTensors

    def results(self) -> dict[_Key, None]:
        """Return the keys, in order."""
        gradients = [(Role.GRADIENT, name) for name in self.gradients]
        return dict.fromkeys([*self.values, *gradients])

    def __getitem__(self, key: _Key) -> Tensor:
        value = self.gradients[key[1]] if key[0] is Role.GRADIENT else self.values[key]
        assert value is not None
        return value


def check_step(
    program: Program,
    name: str,
    step: StepGraph,
    batch: Mapping[str, Tensor],
) -> None:
    """Run a batch through the step graph and through eager autograd with the same stateless random
    numbers, and compare the results.

    Loss, metrics, buffers and every gradient are compared. If the number of rows is dynamic,
    another number is tried too, because a derivative may have baked it in. Autograd's gradients
    are stored, and those of the step graph are compared with them one by one.

    Args:
        program: the program that `step` was derived from; its weights are read.
        name: name of the training graph.
        step: its step graph, for the CPU.
        batch: an example, (rows, ...) tensors on the CPU; inputs of other graphs are ignored.

    Raises:
        CaptureError: something differs.
    """
    capture, stream = program.graphs[name], ResultStream(step)
    for example in replay_batches(
        capture, {i.name: batch[i.name] for i in capture.inputs}, Check.USUAL
    ):
        _check_batch(program, capture, stream, example)


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
    program: Program, capture: GraphCapture, stream: ResultStream, batch: Mapping[str, Tensor]
) -> None:
    rows = next(iter(batch.values())).shape[0]
    scalars = _scalars(rows, rows)
    state = {name: program.state[name] for name in program.state} | dict(program.constants)
    expected = _by_autograd(program, capture, batch, scalars, state)
    total = norm_of(expected.gradients.values())
    floor = noise_floor(total)
    tolerance = tolerance_of(capture)
    keys = expected.results()
    computed: set[_Key] = set()
    different: dict[_Key, Tensor] = {}

    def allowed(key: _Key, reference: Tensor) -> float:
        return tolerance_for(reference, tolerance) if key[0] is Role.GRADIENT else tolerance

    def compare(port: Port, value: Tensor) -> None:
        key = port.role, port.name
        computed.add(key)
        if key in keys:
            reference = expected[key]
            if not relative_distance(reference, value, floor) <= allowed(key, reference):
                different[key] = value

    try:
        stream.stream(arguments_of(program, stream.step, batch, rows, rows), compare)
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

    @functools.cache
    def moved() -> _Results:
        return _by_autograd(program, capture, batch, scalars, nudged(state))

    @functools.cache
    def exact() -> Reference | None:
        def call(twin: GraphCapture) -> Mapping[Key, Tensor | None]:
            precise = _by_autograd(program, twin, doubled(batch), scalars, doubled(state))
            return {key: precise[key] for key in precise.results()}

        return reference_of(
            capture, call, {key: expected[key] for key in keys if key[0] is Role.GRADIENT}
        )

    for key in keys:
        is_gradient = key[0] is Role.GRADIENT
        # a gradient is never missing; a buffer is, if forward does not write to it
        if key not in different and (key in computed or not is_gradient):
            continue
        reference = expected[key]
        distance = relative_distance(reference, different.get(key), floor)
        # A bias before a softmax, for example, has a gradient that is only rounding error, and the
        # joint graph rounds differently from autograd. So a gradient that differs is measured
        # against how far it moves when the weights change in their last bit.
        if is_gradient and key in different:
            least = digits_floor(reference, moved()[key], tolerance, total)
            distance = relative_distance(reference, different[key], least)
        if not distance <= allowed(key, reference) and not (
            (precise := exact()) is not None
            and precise.allows(key, reference, different.get(key), floor)
        ):
            raise CaptureError(
                f"the joint graph differs from autograd in the {key[0].value} {key[1]!r} on {rows}"
                " rows",
                where=f"graph {capture.name}",
                expected=f"a relative difference of at most {allowed(key, reference):g}",
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
) -> _Results:
    """Return the results of the captured graph, interpreted with stateless random numbers: outputs,
    buffers, and gradients by backward().
    """
    own = {**state, **{buffer.name: state[buffer.name].clone() for buffer in program.buffers}}
    module = StepModule(
        capture, own, trainable_parameters(program, capture), program.aliases, torch.device("cpu")
    )
    trained = {n: p for n, p in module.parameters_by_name().items() if p.requires_grad}
    *outputs, objective = module(*(batch[i.name] for i in capture.inputs), *scalars.values())
    gradients = store_gradients(objective, trained)
    for name in gradients.missing():
        del gradients[name]
    values = {(p.role, p.name): v for p, v in zip(module.output_ports(), outputs, strict=True)}
    values |= {(Role.BUFFER, name): value for name, value in module.buffers_by_name().items()}
    return _Results({key: value.detach() for key, value in values.items()}, gradients)
