"""Update graphs are torch.optim's own steps; schedules are tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor, nn, optim

from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.autograd_trace.update import capture_optimizer
from trainload.capture.errors import CaptureError, JobError
from trainload.capture.job import Job
from trainload.capture.program import Program
from trainload.capture.trace import capture

Make = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: optim.AdamW(p, weight_decay=0.1),
    "AMSGrad": lambda p: optim.AdamW(p, amsgrad=True, maximize=True),
    "Adam": lambda p: optim.Adam(p, weight_decay=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampened": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p),
    "RAdam": lambda p: optim.RAdam(p),
    "Rprop": lambda p: optim.Rprop(p),
}


class Normalised(optim.Optimizer):
    """A step along the gradient's direction: every element depends on the norm of all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() * group["lr"])


class Shaped(Normalised):
    """Decays matrices only, by looking at the shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((p.grad + (0.5 * p if p.ndim > 1 else 0)) * group["lr"])


class Counting(Normalised):
    """Counts in a Python number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.sub_(p.grad * group["lr"] / count)


class Remembering(Normalised):
    """Slows down with every step, by a count that is no part of its state."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / self.calls)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(job(Model()))


def captured(program: Program, make: Make, **options: Any) -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    given: Job = job(Model(), optimizer=lambda m: make(m.parameters()), **options)
    return capture_optimizer(given, program)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_steps_are_torchs(program: Program, name: str) -> None:
    (update,) = captured(program, OPTIMIZERS[name])[1]
    torch.manual_seed(2)
    real = nn.Parameter(torch.randn(5, 7))
    flat, optimizer = real.detach().clone().flatten(), OPTIMIZERS[name]([real])
    first, following = update.first.module(), update.following.module()
    state: list[Tensor] = []
    for step, rate in enumerate((0.1, 0.03, 0.3, 0.01, 0.2)):
        real.grad = torch.randn(5, 7)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        arguments = (flat, real.grad.flatten(), torch.tensor(rate), tuple(state))
        flat, *state = following(*arguments) if step else first(*arguments)
    torch.testing.assert_close(flat.view(5, 7), real.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_of_zero_moves_nothing(program: Program, name: str) -> None:
    """As the first step of a warmup, with elements that get no gradient (an embedding's rows that the batch lacks)."""
    (update,) = captured(program, OPTIMIZERS[name])[1]
    start, gradient = torch.randn(12), torch.cat([torch.zeros(6), torch.ones(6)])
    moved, *_ = update.first.module()(start, gradient, torch.tensor(0.0), ())
    if name != "Rprop":  # its steps are sizes of its own
        assert torch.equal(moved, start)
    assert bool(moved.isfinite().all())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_each_element_by_itself_is_elementwise(program: Program, name: str) -> None:
    assert all(u.elementwise for u in captured(program, OPTIMIZERS[name])[1])


def test_an_update_with_a_norm_is_not_elementwise(program: Program) -> None:
    assert not any(u.elementwise for u in captured(program, Normalised)[1])


def test_state_is_described(program: Program) -> None:
    (update,) = captured(program, OPTIMIZERS["AdamW"])[1]
    assert [(s.name, s.dtype, s.like_parameter) for s in update.state] == [
        ("exp_avg", "float32", True),
        ("exp_avg_sq", "float32", True),
        ("step", "float32", False),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Shaped, "depends on the parameter's shape"),
        (Counting, "Python numbers"),
        (Remembering, "differs from the optimizer's own"),
        (lambda p: optim.LBFGS(p), "closure"),
        (lambda p: optim.SparseAdam(p), "flat parameter"),
    ],
)
def test_an_update_that_no_graph_can_be_is_refused(program: Program, make: Make, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(program, make)


def test_groups_keep_their_own_options(program: Program) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0, "lr": 0.2}], lr=0.1)

    recipe, updates = capture_optimizer(job(Model(), optimizer=make), program)
    assert [g.parameters for g in recipe.groups] == [("first.weight", "last.weight"), ("first.bias", "last.bias")]
    assert [g.learning_rates for g in recipe.groups] == [(0.1,), (0.2,)]
    one, zero, rate = torch.ones(3), torch.zeros(3), torch.tensor(0.1)
    moved = [u.first.module()(one, zero, rate, ())[0] for u in updates]
    torch.testing.assert_close(moved[0], torch.full((3,), 0.95))
    torch.testing.assert_close(moved[1], one)


def test_a_parameter_that_the_optimizer_lacks_is_warned_of(program: Program) -> None:
    with pytest.warns(UserWarning, match=r"2 parameters .* not in the optimizer.*last\.bias, last\.weight"):
        recipe, _ = capture_optimizer(job(Model(), optimizer=lambda m: optim.SGD(m.first.parameters(), lr=0.1)), program)
    assert [g.parameters for g in recipe.groups] == [("first.bias", "first.weight")]


def test_a_frozen_parameter_in_the_optimizer_is_left_out() -> None:
    model = Model()
    model.first.weight.requires_grad_(False)
    given = job(model)
    recipe, _ = capture_optimizer(given, capture(given))
    assert "first.weight" not in recipe.groups[0].parameters


def test_a_tensor_that_is_no_parameter_is_refused(program: Program) -> None:
    with pytest.raises(JobError, match="no parameter of the model"):
        capture_optimizer(job(Model(), optimizer=lambda m: optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)), program)


def test_a_factor_schedule_is_tabulated(program: Program) -> None:
    recipe, _ = captured(program, OPTIMIZERS["SGD"], schedule=lambda step: 1 / (step + 1), steps=4)
    assert recipe.groups[0].learning_rates == pytest.approx((0.1, 0.05, 0.1 / 3, 0.025))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
        lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=6, cycle_momentum=False),
        lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 6),
    ],
)
def test_a_scheduler_is_tabulated_as_it_runs(program: Program, make: Callable[[optim.Optimizer], optim.lr_scheduler.LRScheduler]) -> None:
    recipe, _ = captured(program, OPTIMIZERS["AdamW"], schedule=make, steps=6)
    real = optim.AdamW([nn.Parameter(torch.ones(1))])
    scheduler = make(real)
    expected = []
    for step in range(6):
        if step:
            real.step()
            scheduler.step()
        expected.append(real.param_groups[0]["lr"])
    assert recipe.groups[0].learning_rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=6), "cycle_momentum=False"),
        (lambda step: "fast", "neither a factor|not return a number|fails"),
        (lambda step: float("nan"), "not return a number"),
        (lambda step: 1 / (2 - step), "step 2"),
        (lambda o: optim.lr_scheduler.ReduceLROnPlateau(o), "fails"),
    ],
)
def test_a_schedule_that_no_table_can_be_is_refused(program: Program, schedule: Any, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(JobError, match=message):
            captured(program, OPTIMIZERS["AdamW"], schedule=schedule, steps=6)
