"""`compare_run` finds the step at which a run departs from its steps computed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.launch.debugging.planted_faults import (
    LAYERS,
    ROWS,
    WIDTH,
    Chain,
    chain_loss,
    freeze,
    linear,
    plain_batch,
    rolled_loss,
    save,
)
from tests.launch.debugging.wrong_devices import (
    ELEMENT,
    FAULT,
    replaced_step,
    step_after_a_flip,
    train_with_a_wrong_device,
)
from tests.laws.runs import Run, ranks

import trainload
from trainload.core.errors import RequestError
from trainload.packaging.package import Package

STEPS = 6


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return freeze(
        tmp_path_factory.mktemp("package"),
        linear(),
        rolled_loss,
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


@pytest.fixture(scope="module")
def broken(package: Package, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run during which a bit of a parameter has changed in memory."""
    with replaced_step(step_after_a_flip):
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


def test_a_rank_that_computes_a_wrong_activation_is_found_with_its_module_and_line(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    batch = plain_batch() | {"layer": torch.full((ROWS,), LAYERS)}
    package = freeze(tmp_path, Chain(), chain_loss, batch, steps=STEPS)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((ROWS * STEPS, WIDTH), dtype=np.float32)
    rows = save(tmp_path / "rows.npz", x=x, layer=np.full(ROWS * STEPS, LAYERS))
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero0")
    run = Run(tmp_path / "run", package, plan, rows, {"statistics": 1})
    with ranks(2, [run], tmp_path, act=train_with_a_wrong_device) as started:
        for process in started:
            process.join(300)
    comparison = trainload.compare_run(tmp_path / "run")
    assert comparison.departure is not None
    first = comparison.modules[0]
    assert (comparison.departure.step, first.step) == (FAULT, FAULT)
    assert (first.module, first.operator, first.measure) == ("layers.0", "tanh", "rms")
    assert "torch.tanh(self.linear(x))" in first.line
    assert first.recorded > first.computed


def test_a_run_of_two_ranks_equals_its_steps_computed_again(
    package: Package, data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
    options = {"checkpoint_every": 2, "keep": STEPS, "statistics": 1}
    with ranks(2, [Run(tmp_path / "run", package, plan, data, options)], tmp_path) as started:
        for process in started:
            process.join(300)
    comparison = trainload.compare_run(tmp_path / "run")
    assert (comparison.steps, comparison.departure) == (STEPS, None)
    assert (comparison.modules, comparison.parameters) == ((), ())


def test_a_step_that_was_not_made_is_rejected(broken: Path) -> None:
    with pytest.raises(RequestError, match=rf"step: .* \(expected 1 to {STEPS}, got 7\)"):
        trainload.compare_run(broken, step=STEPS + 1)
