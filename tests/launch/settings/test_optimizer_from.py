"""A run that starts with a previous run's optimizer state trains like its continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.laws.runs import Run, train
from tests.selection import selected
from torch import nn

import trainload
from trainload.core.errors import CheckpointError
from trainload.launching.run.result import RunResult
from trainload.packaging.package import Package
from trainload.sharding.plans.strategies import Strategy

ROWS = 16
"""Number of rows of the data and of a global batch, so that every step sees all rows."""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    job = trainload.Job(
        model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        batch={"x": torch.randn(4, 4), "y": torch.randn(4, 1)},
        loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
        steps=3,
        global_batch=ROWS,
    )
    return trainload.freeze(job, tmp_path_factory.mktemp("package") / "job.tl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    draw = np.random.default_rng(0)
    np.savez(
        path,
        x=draw.standard_normal((ROWS, 4)).astype(np.float32),
        y=draw.standard_normal((ROWS, 1)).astype(np.float32),
    )
    return path


def trained(
    package: Package, rows: Path, run_dir: Path, steps: int, **options: Any
) -> tuple[list[float], RunResult]:
    losses: list[float] = []
    result = trainload.launch(
        package,
        trainload.plan(package, trainload.Cluster(devices_per_node=1), "single"),
        rows,
        run_dir=run_dir,
        steps=steps,
        backend="local",
        compile=False,
        on_event=lambda event: losses.append(event.data["loss"]) if event.kind == "step" else None,
        **options,
    )
    return losses, result


@pytest.fixture(scope="module")
def whole(package: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a single run of six steps."""
    return trained(package, rows, tmp_path_factory.mktemp("whole") / "run", 6)[0]


@pytest.fixture(scope="module")
def half(package: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run of three steps with an output package."""
    folder = tmp_path_factory.mktemp("half")
    return trained(package, rows, folder / "run", 3, output=folder / "half.tl")[1]


def test_it_goes_on_as_one_run_would_have(
    rows: Path, whole: list[float], half: RunResult, tmp_path: Path
) -> None:
    assert half.output is not None
    losses, _ = trained(
        trainload.open(half.output), rows, tmp_path / "run", 3, optimizer_from=half.run_dir
    )
    assert losses == pytest.approx(whole[3:], rel=TOLERANCE)


def test_without_it_the_optimizer_begins_anew(
    rows: Path, whole: list[float], half: RunResult, tmp_path: Path
) -> None:
    assert half.output is not None
    losses, _ = trained(trainload.open(half.output), rows, tmp_path / "run", 3)
    assert losses[0] == pytest.approx(whole[3], rel=TOLERANCE)
    assert abs(losses[2] - whole[5]) > 100 * TOLERANCE * whole[5]


@pytest.fixture(scope="module")
def pairs(
    rows: Path,
    half: RunResult,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[Strategy, list[float]]:
    """Strategy -> losses of a run on two workers that continues after the first three steps."""
    folder = tmp_path_factory.mktemp("pairs")
    assert half.output is not None
    package = trainload.open(half.output)
    strategies: list[Strategy] = sorted(selected(request, "strategy"))
    plans = [
        trainload.plan(package, trainload.Cluster(devices_per_node=2), strategy)
        for strategy in strategies
    ]
    options = {"steps": 3, "optimizer_from": str(half.run_dir)}
    runs = [
        Run(folder / strategy, package, plan, rows, options)
        for strategy, plan in zip(strategies, plans, strict=True)
    ]
    return dict(zip(strategies, train(2, runs, folder), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param("zero3", id="2-zero3"), pytest.param("zero1", id="2-zero1")]
)
def test_it_goes_on_under_another_plan(
    whole: list[float], pairs: dict[Strategy, list[float]], strategy: Strategy
) -> None:
    assert pairs[strategy] == pytest.approx(whole[3:], rel=TOLERANCE)


def test_a_run_of_another_package_is_refused_before_anything_starts(
    tiny: Package, tiny_data: Path, half: RunResult, tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match="from a different run than the one that produced the package"
    ):
        trained(tiny, tiny_data, tmp_path / "run", 1, optimizer_from=half.run_dir)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_is_refused_before_anything_starts(
    package: Package, rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError, match="there is no usable checkpoint to load the optimizer state from"
    ):
        trained(package, rows, tmp_path / "run", 1, optimizer_from=tmp_path / "empty")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_resumed_goes_on_with_its_own_state(
    rows: Path, whole: list[float], half: RunResult, tmp_path: Path
) -> None:
    assert half.output is not None
    package = trainload.open(half.output)
    trained(package, rows, tmp_path / "run", 2, optimizer_from=half.run_dir)
    losses: list[float] = []
    trainload.resume(
        tmp_path / "run",
        steps=3,
        backend="local",
        on_event=lambda event: losses.append(event.data["loss"]) if event.kind == "step" else None,
    )
    assert losses == pytest.approx(whole[5:], rel=TOLERANCE)
