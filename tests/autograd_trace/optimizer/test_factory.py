"""Capture of an optimizer factory's changes to the model, and of parameters that it leaves out.

Parameters that are in no optimizer are not trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trained import assert_trains_as_eager
from torch import Tensor, nn, optim

import trainload
from trainload import Job
from trainload.autograd_trace.graphs import Role
from trainload.core.errors import JobError
from trainload.sharding.plans.device_step_graphs import step_graphs


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.norm(self.body(x)).relu()).square().mean()
        return loss


def freezes_the_body(model: Any) -> optim.Optimizer:
    model.body.requires_grad_(False)
    return optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def puts_the_norm_into_eval_mode(model: Any) -> optim.Optimizer:
    model.norm.eval()
    return optim.SGD(model.parameters(), lr=0.1)


def scales_the_weights(model: Any) -> optim.Optimizer:
    with torch.no_grad():
        model.head.weight.mul_(3.0)
    return optim.SGD(model.parameters(), lr=0.1)


def replaces_the_head(model: Any) -> optim.Optimizer:
    torch.manual_seed(1)
    model.head = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    return optim.SGD(model.parameters(), lr=0.1)


def trains_the_head(model: Any) -> optim.Optimizer:
    return optim.AdamW(model.head.parameters(), lr=0.1)


def job(factory: object, model: nn.Module | None = None) -> Job:
    return Job(model or Model(), {"x": rows()[:8]}, factory)  # type: ignore[arg-type]  # a factory


def rows() -> Tensor:
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(1)) + 1.0


@pytest.mark.matrix("replaces_the_head")
@pytest.mark.parametrize(
    "factory",
    [freezes_the_body, puts_the_norm_into_eval_mode, scales_the_weights, replaces_the_head],
)
def test_what_a_factory_changes_is_trained_with(factory: object, tmp_path: Path) -> None:
    assert_trains_as_eager(job(factory), {"x": rows()}, tmp_path)


def test_a_factory_is_called_once(tmp_path: Path) -> None:
    calls = []

    def factory(model: nn.Module) -> optim.Optimizer:
        calls.append(model)
        return optim.SGD(model.parameters(), lr=0.1)

    trainload.freeze(job(factory), tmp_path / "job.tl")
    assert len(calls) == 1


def test_a_factory_that_makes_no_optimizer_is_refused_before_the_capture(tmp_path: Path) -> None:
    class Fails(Model):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("captured")

    with pytest.raises(JobError, match="does not return an optimizer"):
        trainload.freeze(job(lambda model: None, Fails()), tmp_path / "job.tl")


@pytest.mark.slow  # The case of tied parameters is the harder one
@pytest.mark.filterwarnings("ignore:.*are in no optimizer")
def test_an_optimizer_of_the_head_trains_the_head_alone(tmp_path: Path) -> None:
    assert_trains_as_eager(job(trains_the_head), {"x": rows()}, tmp_path)


@pytest.mark.filterwarnings("ignore:.*are in no optimizer")
def test_a_tied_head_trains_what_it_is_tied_to(tmp_path: Path) -> None:
    model = Model()
    model.head.weight = model.body.weight
    assert_trains_as_eager(job(trains_the_head, model), {"x": rows()}, tmp_path)


@pytest.mark.filterwarnings("ignore:.*are in no optimizer")
def test_what_is_in_no_optimizer_has_neither_a_gradient_nor_state(tmp_path: Path) -> None:
    package = trainload.freeze(job(trains_the_head), tmp_path / "job.tl")
    step = step_graphs(package, torch.device("cpu"))["train"]
    assert sorted(port.name for port in step.outputs if port.role is Role.GRADIENT) == [
        "head.bias",
        "head.weight",
    ]


def test_parameters_in_no_optimizer_are_named(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=r"4 parameters require a gradient but are in no optimizer.*body\.bias, body\.weight",
    ):
        trainload.freeze(job(trains_the_head), tmp_path / "job.tl")
