"""Backward passes that hold one gradient at a time: all gradients of a model take as much memory as
its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from trainload.capture.job.stored_tensors import StoredTensors
from trainload.capture.parity.distance import (
    noise_floor,
    norm_of,
    relative_distance,
    tolerance_for,
)
from trainload.core.errors import CaptureError
from trainload.core.host_memory import return_free_memory


@dataclass(frozen=True, slots=True)
class ComparedGradients:
    """The gradients of a backward pass, compared with expected ones.

    Attributes:
        total: norm of the expected gradients.
        reached: parameters that got a gradient.
        different: the gradient of each parameter that differs by more than its tolerance; None if
            it got none.
    """

    total: float
    reached: set[str] = field(default_factory=set)
    different: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        """The least norm to which a distance is relative."""
        return noise_floor(self.total)


def store_gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> StoredTensors:
    """Run the backward pass of a loss as a training loop does, and store the gradients.

    Args:
        loss: 0-dim. If it requires no gradient, no parameter has one.
        leaves: parameters that require a gradient, each once. Their `grad` is None afterwards.

    Raises:
        CaptureError: a parameter has a sparse gradient.
        StorageError: as for `StoredTensors`.
    """
    stored = StoredTensors()
    stored.update(dict.fromkeys(leaves))
    layouts: dict[str, torch.layout] = {}

    def receive(name: str, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            stored.add(name, gradient)
        else:
            layouts[name] = gradient.layout

    run_backward(loss, leaves, receive)
    for name in leaves:
        if name in layouts:
            raise CaptureError(
                "a parameter has a sparse gradient, which gradient buckets and optimizer graphs do"
                " not support",
                where=f"Job.model: {name}",
                expected="torch.strided",
                got=str(layouts[name]),
                hint="Create the embedding with sparse=False.",
            )
    return stored


def compare_gradients(
    loss: Tensor,
    leaves: Mapping[str, Tensor],
    expected: Mapping[str, Tensor | None],
    tolerance: float,
) -> ComparedGradients:
    """Run the backward pass of a loss, and compare each gradient with the expected one.

    Args:
        loss: as for `store_gradients`.
        leaves: as for `store_gradients`.
        expected: a gradient for each of them.
        tolerance: largest relative distance that counts as equal.
    """
    compared = ComparedGradients(norm_of(expected.values()))

    def compare(name: str, gradient: Tensor | None) -> None:
        wanted = expected[name]
        distance = relative_distance(wanted, gradient, compared.floor)
        if not distance <= tolerance_for(wanted, tolerance):
            compared.different[name] = gradient

    def receive(name: str, gradient: Tensor) -> None:
        assert name not in compared.reached, f"a graph has two gradients of {name}"
        compared.reached.add(name)
        compare(name, gradient)

    run_backward(loss, leaves, receive)
    for name in leaves:
        if name not in compared.reached:
            compare(name, None)
    return compared


def run_backward(
    loss: Tensor, leaves: Mapping[str, Tensor], receive: Callable[[str, Tensor], None]
) -> None:
    """Run the backward pass of a loss, and pass each gradient to `receive` once it is complete.

    Code that runs backward passes of parts, such as reentrant checkpoints, yields several gradients
    of one parameter, to be added. Such code does not support `torch.autograd.grad`.
    """

    def take(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        receive(name, gradient)

    for leaf in leaves.values():
        leaf.grad = None
    handles = [
        leaf.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]
        for name, leaf in leaves.items()
    ]
    try:
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    return_free_memory()
