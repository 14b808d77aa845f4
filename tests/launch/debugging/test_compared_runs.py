"""`compare_run` finds the step at which a run departs from its steps computed again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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
    save,
)
from tests.laws.runs import Run, ranks
from tests.laws.worker import train_as_rank
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Corrupting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class
    """A device that computes one element of a hyperbolic tangent wrong."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default:
            value[0, 0] = 40.0
        return value


def train_with_a_wrong_device(entries: list[dict[str, Any]]) -> None:
    """Train as a rank of which the second has a device that breaks before step `FAULT`."""
    step = Engine.step

    def faulty(self: Engine, number: int, draws: Sequence[Draw], *args: Any) -> StepResult:
        is_broken = number >= FAULT - 1 and os.environ["RANK"] == "1"
        with _Corrupting() if is_broken else nullcontext():  # type: ignore[no-untyped-call]
            return step(self, number, draws, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", faulty)
        train_as_rank(entries)


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
