"""Compares two graphs of one program: the output of a pass with its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from trainload.capture.parity.distance import (
    digits_floor,
    noise_floor,
    norm_of,
    nudged,
    relative_distance,
)
from trainload.capture.parity.parity import replaying, tolerance_of
from trainload.capture.program import GraphCapture, OutputRole, Program
from trainload.core.errors import CaptureError, DataError, raised


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference between two graphs.

    Attributes:
        graph: name of the graph ("train").
        value: "loss 'loss'", "gradient of a.weight", "buffer mean", ...
        distance: L2, relative to the norm of the first graph's value (for a gradient that is mostly
            rounding error: to a larger norm); 0 if all bits are equal; infinite if shapes differ,
            or if only one has a value or a NaN there.
        tolerance: largest distance that counts as equal, by the precisions that the first graph
            computes in.
    """

    graph: str
    value: str
    distance: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """True if the graphs count as equal."""
        return self.distance <= self.tolerance


def compare(
    name: str, before: Program, after: Program, batches: Sequence[Mapping[str, Tensor]]
) -> Difference:
    """Run one graph of two programs on the same batches and return the largest difference.

    Each batch has its own seed.

    Outputs and buffers are compared, and for a training graph every parameter's gradient. Dropout
    is on, from the same generator state for both graphs: a graph that draws other random numbers,
    or in another order, differs.

    Args:
        name: name of the graph.
        before: the reference program. Its state is used for both; both programs have the same
            state.
        after: the program to check.
        batches: batches on the CPU.

    Raises:
        CaptureError: if a graph fails, or the second writes to a parameter.
        DataError: if the first graph's loss is not finite on a batch, so that a comparison would
            show nothing.
    """
    first, second = before.graphs[name], after.graphs[name]
    state = {key: before.state[key] for key in before.state}
    nudged_state: dict[str, Tensor] = {}
    worst = Difference(name, "", 0.0, tolerance_of(first))
    for seed, batch in enumerate(batches):
        expected = _replay(first, before, state, batch, seed, "the graph before the pass")
        loss = next(
            (value for key, value in expected.items() if key.startswith(OutputRole.LOSS)), None
        )
        if loss is not None and not bool(loss.isfinite()):
            raise DataError(
                "the loss is not finite on this batch, so the graphs cannot be compared",
                where=f"graph {name}",
                got=f"{loss:g}",
            )
        got = _replay(second, after, state, batch, seed, "the graph after the pass")
        if all(_is_equal(value, got.get(key)) for key, value in expected.items()):
            continue
        nudged_state = nudged_state or nudged(state)
        moved = _replay(first, before, nudged_state, batch, seed, "the graph before the pass")
        total = norm_of(v for k, v in expected.items() if k.startswith("gradient"))
        for key, value in expected.items():
            other = moved[key]
            floor = 0.0
            if key.startswith("gradient") and value is not None and other is not None:
                floor = max(noise_floor(total), digits_floor(value, other, worst.tolerance, total))
            distance = relative_distance(value, got.get(key), floor)
            if distance > worst.distance:
                worst = Difference(name, key, distance, worst.tolerance)
    return worst


def _replay(
    capture: GraphCapture,
    program: Program,
    state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    seed: int,
    what: str,
) -> dict[str, Tensor | None]:
    """Run a graph and return its outputs, buffers and gradients by description."""
    training = capture.training
    buffers = {spec.name: state[spec.name].clone() for spec in program.buffers}
    owned = {
        p.name: state[p.name].detach().requires_grad_(training and p.trainable)
        for p in program.parameters
        if p.alias_of is None
    }
    versions = {name: tensor._version for name, tensor in owned.items()}
    owners = program.aliases
    entries = iter([batch[spec.name] for spec in capture.inputs])
    arguments: list[Tensor] = []
    for spec in capture.exported.graph_signature.input_specs:
        target = str(spec.target)
        match spec.kind:
            case InputKind.USER_INPUT:
                arguments.append(next(entries))
            case InputKind.CONSTANT_TENSOR:
                arguments.append(program.constants[f"{capture.name}/{target}"])
            case InputKind.BUFFER:
                arguments.append(buffers[target])
            case _:
                arguments.append(owned[owners.get(target, target)])
    results: dict[str, Tensor | None] = {}
    with replaying(training, seed):
        try:
            outputs = capture.exported.graph_module(*arguments)
            for spec, value in zip(capture.outputs, outputs, strict=True):
                results[f"{spec.role} {spec.name!r}"] = value.detach()
            loss = next(
                (
                    v
                    for s, v in zip(capture.outputs, outputs, strict=True)
                    if s.role is OutputRole.LOSS
                ),
                None,
            )
            trained = {name: tensor for name, tensor in owned.items() if tensor.requires_grad}
            gradients: Sequence[Tensor | None] = [None] * len(trained)
            if loss is not None and loss.requires_grad:
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        except Exception as error:  # torch's kernels may raise anything
            raise CaptureError(
                f"{what} fails: {raised(error)}", where=f"graph {capture.name}"
            ) from error
    written = sorted(name for name, tensor in owned.items() if tensor._version != versions[name])
    if written:
        raise CaptureError(
            f"{what} writes to a parameter",
            where=f"graph {capture.name}",
            got=", ".join(written[:4]),
        )
    results |= {
        f"gradient of {name}": gradient for name, gradient in zip(trained, gradients, strict=True)
    }
    return results | {f"buffer {name}": value for name, value in buffers.items()}


def _is_equal(expected: Tensor | None, got: Tensor | None) -> bool:
    return (expected is None and got is None) or (
        expected is not None and got is not None and torch.equal(expected, got)
    )
