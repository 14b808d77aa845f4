"""Updates that branch on values in Python are captured with all paths through their branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autograd_trace.optimizer.captured_updates import capture_of_the_model, captured
from torch import Tensor, optim

from trainload.autograd_trace.optimizer import value_branches as ways
from trainload.autograd_trace.optimizer.value_branches import TooManyWays, Ways
from trainload.capture.program import Program
from trainload.core.errors import CaptureError

STEPS = 12
FEW = 2
"""Maximum number of paths in tests that set it: every path is traced, so `MOST_WAYS` would be slow.
"""
Change = Callable[[Tensor, Tensor, dict[str, Any]], None]


class Branching(optim.Optimizer):
    """Counts its steps, and changes a parameter by `change(parameter, gradient, state)`."""

    def __init__(self, params: Any, change: Change) -> None:
        super().__init__(params, {"lr": 0.1})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"], state["slow"] = 0, p.clone()
                state["step"] += 1
                self.change(p, p.grad * group["lr"], state)


def warmed(p: Tensor, moved: Tensor, state: dict[str, Any]) -> None:
    """Take smaller steps at first, like rectified Adam."""
    p.sub_(moved if state["step"] > 5 else moved * 0.1)


def looking_ahead(p: Tensor, moved: Tensor, state: dict[str, Any]) -> None:
    """Return halfway to a slow copy in every third step, like Lookahead."""
    p.sub_(moved)
    if state["step"] % 3 == 0:
        state["slow"].lerp_(p, 0.5)
        p.copy_(state["slow"])


def nested(p: Tensor, moved: Tensor, state: dict[str, Any]) -> None:
    """Branch within a branch, the inner one on `.item()`."""
    if state["step"] < 7:
        if (moved.sum() > 0).item():
            p.sub_(moved)
        else:
            p.add_(moved)
    elif not state["step"] % 2:
        p.mul_(0.9)


def trusted(p: Tensor, moved: Tensor, state: dict[str, Any]) -> None:
    """Scale the step by a trust ratio unless a norm is zero, like LARS."""
    norm, size = p.norm(), moved.norm()
    p.sub_(moved * (norm / size if norm > 0 and size > 0 else 1.0))


def sized(p: Tensor, moved: Tensor, state: dict[str, Any]) -> None:
    """Scale the step by the number of elements."""
    p.sub_(moved / p.numel())


def projected(p: Tensor, moved: Tensor, state: dict[str, Any]) -> None:
    """Restore the norm of a matrix that grew too much, like AdamP."""
    before = p.norm()
    p.sub_(moved)
    if p.ndim > 1 and p.norm() > 1.05 * before:
        p.mul_(before / p.norm())


def many(p: Tensor, moved: Tensor, state: dict[str, Any]) -> None:
    """Branch into more than `FEW` paths."""
    for power in range(FEW):
        if state["step"] > power:
            p.sub_(moved)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_of_the_model()


CHANGES = [
    (warmed, False),
    (looking_ahead, False),
    (nested, True),
    (trusted, True),
    (sized, True),
    (projected, True),
]


@pytest.mark.matrix("looking_ahead", "sized", "projected")
@pytest.mark.parametrize(
    ("change", "whole"), CHANGES, ids=[change.__name__ for change, _ in CHANGES]
)
def test_the_way_is_the_one_that_the_values_choose(
    program: Program, change: Change, whole: bool
) -> None:
    update = captured(program, lambda p: Branching(p, change))[1][-1]
    assert (update.shape is not None) is whole
    generator = torch.Generator().manual_seed(3)
    real = torch.randn((8, 8), generator=generator)
    p = real.clone() if whole else real.clone().flatten()
    optimizer = Branching([real], change)
    first, following = update.first.module(), update.following.module()
    state: list[Tensor] = []
    for step in range(STEPS):
        real.grad = torch.randn((8, 8), generator=generator)
        optimizer.step()
        arguments = (p, real.grad.view(p.shape), torch.tensor(0.1), tuple(state))
        p, *state = following(*arguments) if step else first(*arguments)
    torch.testing.assert_close(p.view(8, 8), real, rtol=1e-5, atol=1e-6)


def test_too_many_ways_are_refused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "MOST_WAYS", FEW)
    with pytest.raises(CaptureError, match=f"more than {FEW} paths"):
        captured(program, lambda p: Branching(p, many))


def test_every_way_is_run_once() -> None:
    taken = Ways()
    x = torch.tensor([-1.0, 0.0, 2.0])

    def run(decide: Callable[[Tensor], bool]) -> tuple[Tensor, ...]:
        if decide(x[0] > 0):
            return (torch.tensor(1.0),)
        return (torch.tensor(2.0),) if decide(x[2] > 0) else (torch.tensor(3.0),)

    assert [float(v) for v in taken.results(run)] == [2.0]
    assert taken.count == 3


def test_ways_that_differ_in_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        Ways().results(lambda decide: (torch.zeros(2 if decide(torch.tensor(1.0)) else 3),))


def test_the_number_of_ways_is_bounded() -> None:
    with pytest.raises(TooManyWays):
        Ways().results(
            lambda decide: (torch.tensor(float(sum(decide(torch.tensor(1.0)) for _ in range(6)))),)
        )
