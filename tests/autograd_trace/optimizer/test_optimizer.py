"""Update graphs are the steps of torch.optim."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest
import torch
from tests.autograd_trace.optimizer.captured_updates import (
    ELEMENTWISE,
    WHOLE,
    adafactor,
    capture_of_the_model,
    captured,
    compare,
    of_each_element,
)
from tests.capture.jobs import Model, job
from tests.optimizers import optimizer_of
from torch import nn, optim
from torch.export import ExportedProgram

from trainload.autograd_trace.optimizer import update_graph
from trainload.autograd_trace.optimizer.optimizer_groups import with_trained
from trainload.capture.job.definition import Job
from trainload.capture.program import GraphCapture, OutputRole, OutputSpec, ParameterSpec, Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import JobError

one_of_each_family = pytest.mark.matrix(
    when=lambda name: (
        name in ("Adagrad-tensor", "Adam", "Adam-tensors", "SGD", "Lion", "a count in Python")
    )
)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_of_the_model()


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
    """The first step of a warmup has such a learning rate.

    Half of the elements get no gradient, like rows of an embedding that are not in the batch.
    """
    update = of_each_element(name)
    start, gradient = torch.randn(12), torch.cat([torch.zeros(6), torch.ones(6)])
    moved, *_ = update.first.module()(start, gradient, torch.tensor(0.0), ())
    # Rprop has step sizes of its own, and the other one has a minimum rate.
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
    # Muon's products in bfloat16 are slow on a CPU.
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
