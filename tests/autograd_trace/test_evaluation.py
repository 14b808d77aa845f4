"""Evaluation is training's forward where the model computes the same in both modes, and a graph of its own elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autograd_trace.test_derive import CPU, program_of, run
from tests.autograd_trace.test_functional import loss_and_metric, operators
from tests.capture.jobs import Model, job
from torch import Tensor, nn

from trainload.autograd_trace import evaluation
from trainload.autograd_trace.aot import derive
from trainload.autograd_trace.evaluation import are_same, derive_evaluation


def without_gradient(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean() + 1
    return x / scale


def in_bfloat16(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = m.last(x)
    return result.float()


def by_mode(training: float, evaluating: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: x * (training if m.training else evaluating)


def precise_in_training(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not m.training):
        result: Tensor = m.last(x)
    return result.float()


ALIKE: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "a part without gradient": lambda: Model(without_gradient),
    "autocast": lambda: Model(in_bfloat16),
    "a buffer that is written in both modes": lambda: Model(lambda m, x: x + m.seen.add_(1), seen=torch.zeros(8)),
}
UNLIKE: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Model(lambda m, x: m.drop(x), drop=nn.Dropout(0.5)),
    "batch norm": lambda: Model(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(8)),
    "a number": lambda: Model(by_mode(2.0, 3.0)),
    "a number's type": lambda: Model(by_mode(2, 2.0)),
    "precision": lambda: Model(precise_in_training),
    "order": lambda: Model(lambda m, x: x - m.a if m.training else m.a - x, a=torch.ones(8)),
    "a constant": lambda: Model(lambda _, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0])),
    "a branch": lambda: Model(lambda _, x: torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_forward_of_training_is_what_is_derived_for_evaluation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    program = program_of(job(ALIKE[name](), loss=loss_and_metric))
    train = derive(program, "train", CPU)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "derive", lambda *_: pytest.fail("derived again"))
        shared = derive_evaluation(program, train, CPU)
    own = derive(program, "eval", CPU)
    batch = {"x": torch.randn(5, 8)}
    assert (set(shared.inputs), set(shared.outputs)) == (set(own.inputs), set(own.outputs))
    assert operators(shared) == operators(own)
    expected = run(own, program, batch, name="eval")
    assert all(torch.equal(value, expected[key]) for key, value in run(shared, program, batch, name="eval").items())


@pytest.mark.parametrize("name", UNLIKE)
def test_what_differs_by_mode_is_derived_apart(name: str) -> None:
    program = program_of(job(UNLIKE[name]()))
    assert not are_same(program.graphs["train"], program.graphs["eval"])
    shared = derive_evaluation(program, derive(program, "train", CPU), CPU)
    assert operators(shared) == operators(derive(program, "eval", CPU))


def test_a_graph_that_draws_in_both_modes_is_derived_apart() -> None:
    program = program_of(job(Model(lambda _, x: x + torch.rand_like(x))))
    assert are_same(program.graphs["train"], program.graphs["eval"])
    shared = derive_evaluation(program, derive(program, "train", CPU), CPU)
    assert shared.inputs == derive(program, "eval", CPU).inputs


def test_the_gradient_takes_no_part_in_it() -> None:
    program = program_of(job(Model(without_gradient)))
    train = derive(program, "train", CPU)
    shared = derive_evaluation(program, train, CPU)
    assert len(shared.module.graph.nodes) < len(train.module.graph.nodes) / 2
