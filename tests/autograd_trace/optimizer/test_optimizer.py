"""Update graphs are torch.optim's own steps; schedules are tables."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from lion_pytorch import Lion
from tests.capture.jobs import Model, job
from tests.optimizers import optimizer_of
from torch import Tensor, nn, optim
from torch.export import ExportedProgram

from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.autograd_trace.optimizer import update_graph
from trainload.autograd_trace.optimizer.optimizer_groups import with_trained
from trainload.capture.job.definition import Job
from trainload.capture.job.parameter_groups import parameter_groups
from trainload.capture.program import GraphCapture, OutputRole, OutputSpec, ParameterSpec, Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError

Make = Callable[[Any], optim.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "Adadelta": lambda p: optim.Adadelta(p, weight_decay=0.1, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adagrad-tensor": lambda p: optim.Adagrad(p, lr=torch.tensor(0.02)),
    "Adagrad-options": lambda p: optim.Adagrad(
        p, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, maximize=True
    ),
    "Adam": lambda p: optim.Adam(p, weight_decay=0.1),
    "Adam-fused": lambda p: optim.Adam(p, fused=True),
    "Adam-tensors": lambda p: optim.Adam(
        p, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99))
    ),
    "AdamW": lambda p: optim.AdamW(p, weight_decay=0.1),
    "AdamW-differentiable": lambda p: optim.AdamW(p, differentiable=True),
    "AMSGrad": lambda p: optim.AdamW(p, amsgrad=True, maximize=True),
    "Adamax": lambda p: optim.Adamax(p, weight_decay=0.1, maximize=True),
    "ASGD": lambda p: optim.ASGD(p, t0=2, lambd=0.1, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p),
    "NAdam-decoupled": lambda p: optim.NAdam(
        p, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "RAdam": lambda p: optim.RAdam(p),
    "RAdam-decoupled": lambda p: optim.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "RMSprop": lambda p: optim.RMSprop(p, weight_decay=0.1),
    "RMSprop-centered": lambda p: optim.RMSprop(p, momentum=0.5, centered=True, maximize=True),
    "Rprop": lambda p: optim.Rprop(p, maximize=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampened": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Lion": lambda p: Lion(p, lr=0.1, weight_decay=0.1),
    "Lion-decoupled": lambda p: Lion(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "a count in Python": lambda p: Counting(p),
    "a count in the options": lambda p: InOptions(p),
    "state made in the constructor": lambda p: Prepared(p, decay=0.5),
}
one_of_each_family = pytest.mark.matrix(
    when=lambda name: (
        name in ("Adagrad-tensor", "Adam", "Adam-tensors", "SGD", "Lion", "a count in Python")
    )
)
WHOLE: dict[str, Make] = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "Adafactor-options": lambda p: optim.Adafactor(
        p, lr=0.1, weight_decay=0.1, maximize=True, d=1.5, beta2_decay=-0.5
    ),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "Muon-options": lambda p: optim.Muon(
        p, lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3
    ),
    "a step of length one": lambda p: Normalised(p),
    "by its shape": lambda p: Shaped(p),
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


class Counting(optim.Optimizer):
    """Counts in a Python number, and reckons with it as optimizers out there do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"], state["flavour"] = 0, torch.zeros_like(p), "plain"
                state["step"] += 1
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                correction = math.sqrt(1 - group["beta"] ** state["step"])
                p.addcdiv_(
                    state["mean"],
                    p.grad.abs() + 1,
                    value=-max(1e-3, min(group["lr"], 1.0)) / correction,
                )


class Prepared(optim.Optimizer):
    """Makes its state in the constructor, out of an option."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.full_like(p, decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p]["mean"].mul_(group["decay"]).add_(p.grad)
                p.sub_(mean * group["lr"])


class Joint(Normalised):
    """Divides every gradient by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(p.grad / norm * group["lr"])


class InOptions(Normalised):
    """Counts in the group's options, and marks there that it has begun."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            group["k"], group["begun"] = group.get("k", 0) + 1, True
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / group["k"])


class Estimating(Normalised):
    """Keeps a number in the group's options that all of its parameters have a part in."""

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
    """Takes as many steps as a value says."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                for _ in range(int(p.grad.norm())):
                    p.sub_(p.grad * group["lr"])


class Untraceable(Normalised):
    """Raises an error without a text where it is traced."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        if torch.compiler.is_exporting():
            raise NotImplementedError
        super().step(closure)


class Listing(Normalised):
    """Keeps a set."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("seen", set()).add(p.grad.norm().item())
                p.sub_(p.grad * group["lr"])


class Remembering(Normalised):
    """Slows down with every step, by a count that is no part of its state."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / self.calls)


@functools.cache
def capture_of_the_model() -> Program:
    return capture(job(Model()))


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_of_the_model()


def captured(
    program: Program, make: Make, *, quiet: bool = False, **options: Any
) -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """`quiet`: parameters that the optimizer lacks are no matter."""
    given: Job = job(Model(), optimizer=lambda m: make(m.parameters()), **options)
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        return optimizer_of(given, program)


@functools.cache
def of_each_element(name: str) -> UpdateGraph:
    """The update of an optimizer of `ELEMENTWISE`, captured once for all tests of it."""
    (update,) = captured(capture_of_the_model(), ELEMENTWISE[name])[1]
    return update


@functools.cache
def adafactor() -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """Adafactor's groups and updates, with a schedule."""
    return captured(
        capture_of_the_model(), WHOLE["Adafactor"], schedule=lambda step: 1 / (step + 1), steps=4
    )


def compare(update: UpdateGraph, make: Make, shape: tuple[int, ...], tolerance: float) -> None:
    """Five steps on a parameter of a shape, beside torch's own optimizer."""
    torch.manual_seed(2)
    real = torch.randn(shape)
    flat = real.clone() if update.shape is not None else real.clone().flatten()
    optimizer = make([real])
    first, following = update.first.module(), update.following.module()
    state: list[Tensor] = []
    for step, rate in enumerate((0.1, 0.03, 0.3, 0.01, 0.2)):
        real.grad = torch.randn(shape)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        arguments = (flat, real.grad.view(flat.shape), torch.tensor(rate), tuple(state))
        flat, *state = following(*arguments) if step else first(*arguments)
    torch.testing.assert_close(flat.view(shape), real, rtol=tolerance, atol=tolerance)


@one_of_each_family
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_update_of_each_element_by_itself_runs_on_any_slice_as_its_optimizer_does(
    name: str,
) -> None:
    update = of_each_element(name)
    assert update.elementwise
    compare(update, ELEMENTWISE[name], (5, 7), 2e-5)


@one_of_each_family
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_learning_rate_of_zero_moves_nothing(name: str) -> None:
    """As the first step of a warmup, with elements that get no gradient (an embedding's rows that
    the batch lacks).
    """
    update = of_each_element(name)
    start, gradient = torch.randn(12), torch.cat([torch.zeros(6), torch.ones(6)])
    moved, *_ = update.first.module()(start, gradient, torch.tensor(0.0), ())
    # the first one's steps are sizes of its own, the second has a least rate
    if name not in ("Rprop", "a count in Python"):
        assert torch.equal(moved, start)
    assert bool(moved.isfinite().all())


@pytest.mark.matrix("Muon", "a step of length one", "by its shape")
@pytest.mark.parametrize("name", WHOLE)
def test_an_update_that_needs_the_whole_parameter_is_captured_for_its_shape(
    program: Program, name: str
) -> None:
    recipe, (update,) = captured(
        program, lambda p: WHOLE[name]([q for q in p if q.ndim == 2]), quiet=True
    )
    assert (update.group, update.shape) == ("group0-8x8", (8, 8))
    assert recipe.groups[0].parameters == ("first.weight", "last.weight")
    compare(update, WHOLE[name], (8, 8), 1e-5)


def test_every_optimizer_of_torch_was_tried() -> None:
    tried = {
        type(make([nn.Parameter(torch.zeros(2, 2))]))
        for make in [*ELEMENTWISE.values(), *WHOLE.values()]
    }
    classes = {
        value
        for value in vars(optim).values()
        if inspect.isclass(value) and issubclass(value, optim.Optimizer)
    }
    assert classes - tried == {optim.Optimizer, optim.LBFGS, optim.SparseAdam}


def test_a_group_of_several_shapes_becomes_a_group_for_each() -> None:
    recipe, updates = adafactor()
    assert [(u.group, u.shape) for u in updates] == [("group0-8", (8,)), ("group0-8x8", (8, 8))]
    assert [g.parameters for g in recipe.groups] == [
        ("first.bias", "last.bias"),
        ("first.weight", "last.weight"),
    ]


def test_state_of_a_shape_of_its_own_is_described() -> None:
    _, (vectors, matrices) = adafactor()
    assert [(s.name, s.like_parameter, s.shape) for s in vectors.state] == [
        ("step", False, ()),
        ("variance", True, ()),
    ]
    assert [(s.name, s.like_parameter, s.shape) for s in matrices.state] == [
        ("col_var", False, (1, 8)),
        ("row_var", False, (8, 1)),
        ("step", False, ()),
    ]


def test_a_large_parameter_is_compared_on_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # a CPU takes long for Muon's products in bfloat16
    monkeypatch.setattr(update_graph, "_CHECKED_ELEMENTS", 2**12)
    parameter = nn.Parameter(torch.empty(4096, 1024, device="meta"))
    captured = GraphCapture(
        "train", cast(ExportedProgram, None), (), (OutputSpec("loss", OutputRole.LOSS),)
    )
    program = Program(
        {"train": captured},
        (ParameterSpec("weight", "float32", (4096, 1024), True, None),),
        (),
        {},
        {},
    )
    model = nn.Module()
    model.weight = parameter
    given = Job(model, {"x": torch.zeros(2)}, lambda m: optim.Muon(m.parameters()))
    (update,) = optimizer_of(given, program)[1]
    assert update.shape == (4096, 1024)


def test_several_optimizers_train_a_model_together(program: Program) -> None:
    def make(model: nn.Module) -> list[optim.Optimizer]:
        parameters = list(model.parameters())
        return [
            optim.Muon([p for p in parameters if p.ndim == 2], lr=0.2),
            optim.AdamW([p for p in parameters if p.ndim < 2], lr=0.1),
        ]

    recipe, updates = optimizer_of(job(Model(), optimizer=make, schedule=lambda step: 0.5), program)
    assert recipe.optimizer == "Muon + AdamW"
    assert list(zip((g.name for g in recipe.groups), recipe.rates(0), strict=True)) == [
        ("group0-8x8", 0.1),
        ("group1", 0.05),
    ]
    assert [u.elementwise for u in updates] == [False, True]


def test_a_parameter_of_two_optimizers_is_refused(program: Program) -> None:
    with pytest.raises(JobError, match=r"two parameter groups.*first"):
        optimizer_of(
            job(
                Model(),
                optimizer=lambda m: [optim.SGD(m.parameters()), optim.Adam(m.first.parameters())],
            ),
            program,
        )


def test_state_is_described() -> None:
    assert [(s.name, s.dtype, s.like_parameter) for s in of_each_element("Adam").state] == [
        ("exp_avg", "float32", True),
        ("exp_avg_sq", "float32", True),
        ("step", "float32", False),
    ]


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
    """Moves parameters that `is_fast` chooses five times as far."""

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


def test_an_attribute_that_is_a_method_of_the_optimizer_is_the_copys_own(program: Program) -> None:
    class Holding(optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.way = self.moved

        def moved(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad * group["lr"])

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
            self.way()

    _, (update,) = captured(program, Holding)
    moved = update.first.module()(torch.ones(3), torch.ones(3), torch.tensor(0.1), ())[0]
    torch.testing.assert_close(moved, torch.full((3,), 0.9))


def test_a_number_taken_out_of_a_tensor_is_refused_at_its_line(program: Program) -> None:
    lines, start = inspect.getsourcelines(Looping)
    line = start + next(i for i, text in enumerate(lines) if "int(" in text)
    with pytest.raises(CaptureError, match=rf"test_optimizer\.py:{line}: .*cannot be captured"):
        captured(program, Looping)


@pytest.mark.slow
def test_groups_keep_their_own_options(program: Program) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        return optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.5},
                {"params": rest, "weight_decay": 0.0, "lr": 0.2},
            ],
            lr=0.1,
        )

    recipe, updates = optimizer_of(job(Model(), optimizer=make), program)
    assert [g.parameters for g in recipe.groups] == [
        ("first.weight", "last.weight"),
        ("first.bias", "last.bias"),
    ]
    assert [g.learning_rates for g in recipe.groups] == [(0.1,), (0.2,)]
    one, zero, rate = torch.ones(3), torch.zeros(3), torch.tensor(0.1)
    moved = [u.first.module()(one, zero, rate, ())[0] for u in updates]
    torch.testing.assert_close(moved[0], torch.full((3,), 0.95))
    torch.testing.assert_close(moved[1], one)


def test_a_parameter_that_the_optimizer_lacks_is_warned_of(program: Program) -> None:
    recipe, _ = optimizer_of(
        job(Model(), optimizer=lambda m: optim.SGD(m.first.parameters(), lr=0.1)), program
    )
    with pytest.warns(
        UserWarning, match=r"2 parameters .* in no optimizer.*last\.bias, last\.weight"
    ):
        partial = with_trained(program, recipe.groups)
    assert [p.name for p in partial.parameters if p.trainable] == ["first.weight", "first.bias"]
    assert [g.parameters for g in recipe.groups] == [("first.bias", "first.weight")]


def test_a_frozen_parameter_in_the_optimizer_is_left_out() -> None:
    model = Model()
    model.first.weight.requires_grad_(False)
    given = job(model)
    recipe, _ = optimizer_of(given, capture(given))
    assert "first.weight" not in recipe.groups[0].parameters


def test_a_tensor_that_is_no_parameter_is_refused(program: Program) -> None:
    with pytest.raises(JobError, match="not a parameter of the model"):
        optimizer_of(
            job(Model(), optimizer=lambda m: optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)),
            program,
        )


def test_a_factor_schedule_is_tabulated(program: Program) -> None:
    recipe, _ = captured(program, ELEMENTWISE["SGD"], schedule=lambda step: 1 / (step + 1), steps=4)
    assert [recipe.rates(step)[0] for step in range(5)] == [
        0.1,
        0.1 * (1 / 2),
        0.1 * (1 / 3),
        0.1 * (1 / 4),
        0.1 * (1 / 4),
    ]


@pytest.mark.parametrize("number", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "torch"])
def test_a_factor_may_be_a_number_of_another_library(number: Any, program: Program) -> None:
    recipe, _ = captured(program, ELEMENTWISE["SGD"], schedule=lambda step: number, steps=4)
    assert recipe.rates(2) == [0.5 * group.learning_rates[0] for group in recipe.groups]


lr = optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[optim.Optimizer], lr.LRScheduler]] = {
    "a function for all": lambda o: lr.LambdaLR(o, lambda s: 0.9**s),
    "a function for each": lambda o: lr.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (1 + s)]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda s: 0.5),
    "OneCycleLR": lambda o: lr.OneCycleLR(
        o, max_lr=[1.0, 2.0], total_steps=6, cycle_momentum=False
    ),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 6),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 3), lr.ExponentialLR(o, 0.9)]),
    "one after another": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 3)], [3]
    ),
}


@pytest.mark.matrix("one after another")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_tabulated_as_it_runs_for_each_group(program: Program, name: str) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(parameter_groups(model, {"*.bias": {"lr": 0.3}}, rest={"lr": 0.1}))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's schedulers warn of one another
        recipe, _ = optimizer_of(
            job(Model(), optimizer=make, schedule=SCHEDULERS[name], steps=6), program
        )
        real = make(Model())
        scheduler = SCHEDULERS[name](real)
        for step in range(6):
            if step:
                real.step()
                scheduler.step()
            assert recipe.rates(step) == [g["lr"] for g in real.param_groups]


def test_groups_share_a_schedule() -> None:
    recipe, _ = adafactor()
    assert recipe.schedules == ((1.0, 1 / 2, 1 / 3, 1 / 4),)
    assert [(g.learning_rates, g.schedule) for g in recipe.groups] == [((0.1,), 0)] * 2


def test_a_table_of_many_steps_is_kept_once_for_many_groups(program: Program) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(
            [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())]
        )

    recipe, _ = optimizer_of(
        job(
            Model(), optimizer=make, schedule=lambda s: 0.5 + 0.5 * math.cos(s / 1e4), steps=10_000
        ),
        program,
    )
    assert len(recipe.groups) == 4
    assert len(recipe.model_dump_json()) < 250_000
    assert recipe.rates(9_999)[3] == 0.4 * recipe.schedules[0][-1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=6),
            "cycle_momentum=False",
        ),
        (lambda step: "fast", "neither a factor|not return a number|fails"),
        (lambda step: float("nan"), "not return a number"),
        (lambda step: 1 / (2 - step), "step 2"),
        (lambda o: optim.lr_scheduler.ReduceLROnPlateau(o), "depends on a metric"),
    ],
)
def test_a_schedule_that_no_table_can_be_is_refused(
    program: Program, schedule: Any, message: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(JobError, match=message):
            captured(program, ELEMENTWISE["AdamW"], schedule=schedule, steps=6)
