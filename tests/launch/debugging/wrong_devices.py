"""Ranks whose devices compute wrong, or whose memory changes, in the middle of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.launch.debugging.planted_faults import WIDTH
from tests.laws.worker import train_as_rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainload.launching.worker.engine import Draw, Engine, StepResult

FAULT = 4
"""Number of the step, from 1, before which a fault appears."""
ELEMENT = (1, 2)
"""Element of the weight of `linear` of which a bit is flipped."""
_Step = Callable[..., StepResult]
_Replacement = Callable[[_Step, Engine, int, Sequence[Draw]], StepResult]


@contextmanager
def replaced_step(
    step: Callable[[_Step, Engine, int, Sequence[Draw]], StepResult],
) -> Iterator[None]:
    """Within the context, steps of engines in this process are computed by a function of the
    original one.
    """
    original = Engine.step

    def replacement(self: Engine, number: int, draws: Sequence[Draw], *_: Any) -> StepResult:
        return step(original, self, number, draws)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", replacement)
        yield


def flip(value: Tensor) -> None:
    """Flip a bit of the exponent of the element of the weight."""
    element = value[ELEMENT[0] * WIDTH + ELEMENT[1]].view(torch.int32)
    element ^= 1 << 25


def step_after_a_flip(
    original: _Step, engine: Engine, number: int, draws: Sequence[Draw]
) -> StepResult:
    """Compute a step; before that of the fault, flip a bit of the parameters."""
    if number == FAULT - 1:
        (flat,) = engine.held.params.values()
        flip(flat)
    return original(engine, number, draws)


def train_with_a_flipped_bit(entries: list[dict[str, Any]]) -> None:
    """Train as a rank; in the memory of the second one a bit of a parameter changes."""
    is_broken = os.environ["RANK"] == "1"
    with replaced_step(step_after_a_flip) if is_broken else nullcontext():
        train_as_rank(entries)


class _Corrupting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class
    """A device that computes one element of a hyperbolic tangent wrong."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default:
            value[0, 0] = 40.0
        return value


def _step_of_a_wrong_device(
    original: _Step, engine: Engine, number: int, draws: Sequence[Draw]
) -> StepResult:
    with _Corrupting() if number >= FAULT - 1 else nullcontext():  # type: ignore[no-untyped-call]
        return original(engine, number, draws)


def train_with_a_wrong_device(entries: list[dict[str, Any]]) -> None:
    """Train as a rank; the device of the second one computes an activation wrong."""
    is_broken = os.environ["RANK"] == "1"
    with replaced_step(_step_of_a_wrong_device) if is_broken else nullcontext():
        train_as_rank(entries)
