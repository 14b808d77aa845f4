"""Optimizers whose update cannot be a graph are rejected with the parameter or line at fault."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autograd_trace.optimizer.captured_updates import (
    Make,
    Normalised,
    capture_of_the_model,
    captured,
)
from tests.capture.jobs import Model, job
from tests.optimizers import optimizer_of
from torch import Tensor, nn, optim

from trainload.capture.program import Program
from trainload.core.errors import CaptureError, JobError


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_of_the_model()


class Joint(Normalised):
    """Divides every gradient by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(p.grad / norm * group["lr"])


class Estimating(Normalised):
    """Keeps a number in the group's options that depends on all of its parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            group["d"] = group.get("d", 1.0) + sum(p.grad.norm().item() for p in group["params"])
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / group["d"])


class Slowing(Normalised):
    """Changes its own learning rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])
            group["lr"] *= 0.9


class Looping(Normalised):
    """Takes as many steps as the norm of the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                for _ in range(int(p.grad.norm())):
                    p.sub_(p.grad * group["lr"])


class Untraceable(Normalised):
    """Raises an error without a message when traced."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        if torch.compiler.is_exporting():
            raise NotImplementedError
        super().step(closure)


class Listing(Normalised):
    """Keeps a set in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("seen", set()).add(p.grad.norm().item())
                p.sub_(p.grad * group["lr"])


class Remembering(Normalised):
    """Slows down with every step, by a count that is not part of its state."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / self.calls)


@pytest.mark.matrix(kind=lambda message: message)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Remembering, "differs from the optimizer's own"),
        (Joint, "depends on other parameters"),
        (Estimating, "depends on other parameters"),
        (Slowing, "changes the learning rate"),
        (Looping, r"cannot be captured: int\(\) reads a number"),
        (Untraceable, "the update of Untraceable cannot be captured: NotImplementedError"),
        (Listing, "state 'seen'.*neither a tensor"),
        (lambda p: optim.LBFGS(p), "closure.*Use AdamW"),
        (lambda p: optim.SparseAdam(p), "sparse gradients.*Use Adam"),
    ],
)
def test_an_update_that_no_graph_can_be_is_refused(
    program: Program, make: Make, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(program, make)


def by_attribute(model: Any) -> optim.Optimizer:
    model.last.weight.fast = True
    return Telling(lambda group, at, p: getattr(p, "fast", False), model.parameters())


def by_identity(model: Any) -> optim.Optimizer:
    chosen = model.last.weight
    return Telling(lambda group, at, p: p is chosen, model.parameters())


def by_name(model: nn.Module) -> optim.Optimizer:
    return Telling(
        lambda group, at, p: group.get("param_names", [""] * 9)[at] == "last.weight",
        model.named_parameters(),
    )


def by_place(model: Any) -> optim.Optimizer:
    return Telling(
        lambda group, at, p: at == 2,
        [model.first.weight, model.first.bias, model.last.weight, model.last.bias],
    )


class Telling(optim.SGD):
    """Moves parameters for which `is_fast` is true five times as far."""

    def __init__(
        self, is_fast: Callable[[dict[str, Any], int, Tensor], bool], parameters: Any
    ) -> None:
        super().__init__(parameters, lr=0.1)
        self.is_fast = is_fast

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for at, p in enumerate(group["params"]):
                if p.grad is not None and self.is_fast(group, at, p):
                    p.grad.mul_(5)
        super().step()


@pytest.mark.parametrize("make", [by_attribute, by_identity, by_name, by_place])
def test_an_optimizer_that_tells_parameters_of_a_group_apart_is_refused_by_their_name(
    program: Program, make: Any
) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        CaptureError, match=r"Telling, last\.weight: the optimizer updates a parameter differently"
    ):
        optimizer_of(job(model, optimizer=make), program)
    assert all(
        torch.equal(value, before[name]) and value.grad is None
        for name, value in model.state_dict(keep_vars=True).items()
    )


def with_scheduler(model: nn.Module) -> optim.Optimizer:
    made = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.CosineAnnealingLR(made, 1000)
    return made


def with_another_step(model: nn.Module) -> optim.Optimizer:
    made = optim.SGD(model.parameters(), lr=0.1)
    inner = made.step
    made.step = lambda closure=None: inner(closure)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("make", "hint"),
    [(with_scheduler, "Job.schedule"), (with_another_step, "SGD.step.*method of a subclass")],
)
def test_an_optimizer_whose_step_was_replaced_is_refused(
    program: Program, make: Any, hint: str
) -> None:
    with pytest.raises(JobError, match=hint):
        optimizer_of(job(Model(), optimizer=make), program)


def test_a_number_taken_out_of_a_tensor_is_refused_at_its_line(program: Program) -> None:
    lines, start = inspect.getsourcelines(Looping)
    line = start + next(i for i, text in enumerate(lines) if "int(" in text)
    with pytest.raises(
        CaptureError, match=rf"test_refused_optimizers\.py:{line}: .*cannot be captured"
    ):
        captured(program, Looping)
