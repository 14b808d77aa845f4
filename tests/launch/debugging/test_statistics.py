"""Statistics of a step by module: dead units, saturated values, and updates that are too large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.launch.debugging.planted_faults import ROWS, WIDTH, freeze, plain_batch, save
from torch import Tensor, nn

import trainload
from trainload.launching.debugging.statistics import (
    ActivationStatistics,
    ParameterStatistics,
    Statistics,
)

HIDDEN = 16
RATE = 0.01


class Gated(nn.Module):
    """Two layers with a rectified and a squashed part; x (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.rectified, self.squashed = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.relu(self.rectified(x)) * torch.sigmoid(self.squashed(x))
        result: Tensor = self.out(mixed)
        return result


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    error: Tensor = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()
    return error


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    return save(tmp_path_factory.mktemp("data") / "rows.npz", x=x)


def statistics_of(folder: Path, data: Path, model: nn.Module, rate: float = RATE) -> Statistics:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), rate)

    package = freeze(folder, model, loss, plain_batch(), optimizer=sgd)
    statistics = trainload.debug(package, data=data, statistics=True).statistics
    assert statistics is not None
    return statistics


def gated() -> Gated:
    torch.manual_seed(0)
    return Gated()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Statistics:
    return statistics_of(tmp_path_factory.mktemp("healthy"), data, gated())


def of_function(statistics: Statistics, operator: str) -> ActivationStatistics:
    (each,) = [each for each in statistics.activations if each.operator == operator]
    return each


def of_parameter(statistics: Statistics, name: str) -> ParameterStatistics:
    (each,) = [each for each in statistics.parameters if each.parameter == name]
    return each


def test_a_healthy_step_has_no_notes(healthy: Statistics) -> None:
    assert {each.note for each in healthy.activations} == {""}
    assert {each.note for each in healthy.parameters} == {""}


def test_activations_are_those_of_the_model(healthy: Statistics, data: Path) -> None:
    model, x = gated(), torch.from_numpy(np.load(data)["x"])
    rectified = torch.relu(model.rectified(x))
    result = of_function(healthy, "relu")
    assert result.rms == pytest.approx(rectified.square().mean().sqrt().item(), rel=1e-5)
    assert result.zeros == pytest.approx((rectified == 0).float().mean().item())
    (out,) = [each for each in healthy.activations if each.module == "out"]
    assert out.greatest == pytest.approx(model(x).abs().max().item(), rel=1e-5)


def test_gradients_and_updates_are_those_of_the_optimizer(healthy: Statistics, data: Path) -> None:
    model, x = gated(), torch.from_numpy(np.load(data)["x"])
    torch.autograd.backward(loss(model, {"x": x}))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        each = of_parameter(healthy, name)
        gradient = parameter.grad.norm().item()
        assert each.norm == pytest.approx(parameter.norm().item(), rel=1e-5)
        assert each.gradient == pytest.approx(gradient, rel=1e-4)
        assert each.update == pytest.approx(RATE * gradient, rel=1e-3)


def test_dead_units_are_noted(tmp_path: Path, data: Path) -> None:
    model = gated()
    nn.init.constant_(model.rectified.bias, -100)
    statistics = statistics_of(tmp_path, data, model)
    assert of_function(statistics, "relu").note == "100 % of its units are dead"


class TwoCalls(nn.Module):
    """A model that calls one activation function twice; x (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.relu(self.first(x)) + torch.relu(self.second(x)))
        return result


def test_a_dead_call_is_not_hidden_by_another_call_in_the_module(
    tmp_path: Path, data: Path
) -> None:
    torch.manual_seed(0)
    model = TwoCalls()
    nn.init.constant_(model.second.bias, -100)
    statistics = statistics_of(tmp_path, data, model)
    notes = [each.note for each in statistics.activations if each.operator == "relu"]
    assert notes == ["", "100 % of its units are dead"]


def test_saturated_values_are_noted(tmp_path: Path, data: Path) -> None:
    model = gated()
    nn.init.constant_(model.squashed.bias, 100)
    statistics = statistics_of(tmp_path, data, model)
    assert of_function(statistics, "sigmoid").note == "100 % saturated"


def test_a_large_update_is_noted(tmp_path: Path, data: Path) -> None:
    statistics = statistics_of(tmp_path, data, gated(), rate=1.0)
    each = of_parameter(statistics, "rectified.weight")
    assert each.ratio is not None
    assert each.ratio > 0.1
    assert each.note == f"the update is {100 * each.ratio:.0f} % of the parameter"
