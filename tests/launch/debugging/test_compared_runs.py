"""`compare_run` finds the step at which a run departs from its steps computed again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.debugging.planted_faults import ROWS, WIDTH, freeze, linear, plain_batch, save
from tests.laws.runs import Run, ranks
from torch import Tensor, nn

import trainload
from trainload.core.errors import RequestError
from trainload.launching.worker.engine import Draw, Engine, StepResult
from trainload.packaging.package import Package

STEPS = 6
FAULT = 4
"""Number of the step, from 1, before which a bit is flipped."""
ELEMENT = (1, 2)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    error: Tensor = (model(batch["x"]) - batch["x"].roll(1, 1)).square().mean()
    return error


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return freeze(
        tmp_path_factory.mktemp("package"),
        linear(),
        loss,
        plain_batch(),
        steps=STEPS,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = np.random.default_rng(0).standard_normal((ROWS * STEPS, WIDTH), dtype=np.float32)
    return save(tmp_path_factory.mktemp("data") / "rows.npz", x=x)


def train(package: Package, data: Path, folder: Path) -> Path:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(
        package,
        plan,
        data,
        run_dir=folder / "run",
        compile=False,
        backend="local",
        checkpoint_every=2,
        keep=STEPS,
    )
    return folder / "run"


def flip(value: Tensor) -> None:
    """Flip a bit of the exponent of the element of the weight."""
    element = value[ELEMENT[0] * WIDTH + ELEMENT[1]].view(torch.int32)
    element ^= 1 << 25


@pytest.fixture(scope="module")
def broken(package: Package, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run during which a bit of a parameter has changed in memory."""
    step = Engine.step

    def faulty(self: Engine, number: int, draws: Sequence[Draw], *args: Any) -> StepResult:
        if number == FAULT - 1:
            (flat,) = self.held.params.values()
            flip(flat)
        return step(self, number, draws, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", faulty)
        return train(package, data, tmp_path_factory.mktemp("broken"))


def test_a_flipped_bit_is_found_at_its_step(broken: Path) -> None:
    comparison = trainload.compare_run(broken)
    assert comparison.departure is not None
    assert comparison.departure.step == FAULT
    assert comparison.departure.recorded != comparison.departure.computed
    assert comparison.greatest < 1e-5


def test_the_parameter_and_its_element_are_named(broken: Path) -> None:
    comparison = trainload.compare_run(broken)
    assert comparison.checkpoint == FAULT
    (parameter,) = comparison.parameters
    assert (parameter.parameter, parameter.element) == ("weight", ELEMENT)
    assert parameter.share > 0.99


def test_a_comparison_begins_with_the_checkpoint_before_its_step(broken: Path) -> None:
    comparison = trainload.compare_run(broken, step=FAULT + 1)
    assert (comparison.began, comparison.departure) == (FAULT, None)
    assert comparison.steps == STEPS - FAULT


def test_a_run_of_two_ranks_equals_its_steps_computed_again(
    package: Package, data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
    options = {"checkpoint_every": 2, "keep": STEPS}
    with ranks(2, [Run(tmp_path / "run", package, plan, data, options)], tmp_path) as started:
        for process in started:
            process.join(300)
    comparison = trainload.compare_run(tmp_path / "run")
    assert (comparison.steps, comparison.departure) == (STEPS, None)
    assert comparison.parameters == ()


def test_a_step_that_was_not_made_is_rejected(broken: Path) -> None:
    with pytest.raises(RequestError, match=rf"step: .* \(expected 1 to {STEPS}, got 7\)"):
        trainload.compare_run(broken, step=STEPS + 1)
