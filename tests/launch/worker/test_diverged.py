"""A step with a non-finite gradient ends the run, even if its loss is finite; it is not saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.laws.runs import Run, ranks
from torch import Tensor, nn, optim

import trainload
from trainload import Graph, Turn
from trainload.core.errors import DivergedError
from trainload.launching.data.sampler import rows
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Shard

ROWS = 4
STEPS = 3
SEED = 3
PLANS: dict[str, dict[str, Any]] = {
    "zero0": {"strategy": "zero0"},
    "zero3": {"strategy": "zero3"},
    "a tensor axis": {
        "tensor_ranks": 2,
        "tensor_rules": {"0.weight": Shard(dim=0), "1.weight": Shard(dim=1)},
    },
    "a pipeline": {"pipeline_ranks": 2},
}


def norm_of_outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss whose gradient is NaN if a row is zero: infinity times zero."""
    y: Tensor = model(batch["x"])
    return (y * y).sum(1).sqrt().mean()


def root_of_sums(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss whose gradient is infinite if a row starts with 0, 1 and the weight is zero."""
    x = batch["x"]
    return (x[:, 0] + model.get_parameter("weight")[0, 0] * x[:, 1]).sqrt().mean()


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.01)


def frozen(folder: Path, model: nn.Module, loss: Callable[..., Tensor], **options: Any) -> Package:
    given: dict[str, Any] = {
        "optimizer": sgd,
        "steps": STEPS,
        "global_batch": ROWS,
        "seed": SEED,
        **options,
    }
    return trainload.freeze(
        trainload.Job(model=model, batch={"x": 1 + torch.rand(ROWS, 8)}, loss=loss, **given),
        folder / "job.tl",
    )


def written(path: Path, step: int, row: np.ndarray[Any, Any]) -> Path:
    """Write rows as npz; the first row of `step` is `row`."""
    x = 1 + np.random.default_rng(0).random((ROWS * STEPS, 8), dtype=np.float32)
    x[rows(SEED, len(x), ROWS * step, 1)[0]] = row
    np.savez(path, x=x)
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    return frozen(tmp_path_factory.mktemp("norms"), model, norm_of_outputs)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with a row of zeros in the last step."""
    return written(tmp_path_factory.mktemp("rows") / "rows.npz", STEPS - 1, np.zeros(8, np.float32))


def alone(package: Package, data: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Train with one worker and an output; return the data of each step in the journal."""
    plan = trainload.plan(package, trainload.Cluster(), "single")
    given: dict[str, Any] = {
        "compile": False,
        "backend": "local",
        "output": folder / "out.tl",
        **options,
    }
    trainload.launch(package, plan, data, run_dir=folder / "run", **given)
    return [dict(event.data) for event in read_events(folder / "run") if event.kind == "step"]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_ends_a_run_whose_loss_is(
    package: Package, data: Path, tmp_path: Path, clip_norm: float | None
) -> None:
    overrides = trainload.Overrides(clip_norm=clip_norm)
    with pytest.raises(
        DivergedError,
        match=rf"step {STEPS}: the gradient's norm is nan \(expected a finite number, got nan\)",
    ):
        alone(package, data, tmp_path, checkpoint_every=1, overrides=overrides)
    events = read_events(tmp_path / "run")
    assert [each.data["step"] for each in events if each.kind == "step"] == list(range(STEPS - 1))
    assert {each.data["step"] for each in events if each.kind == "checkpoint"} <= set(
        range(1, STEPS)
    )
    assert (events[-1].kind, events[-1].data["error"]) == ("failed", "DivergedError")
    assert not (tmp_path / "out.tl").exists()


@pytest.mark.matrix("zero3")
@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_of_a_plan_end_alike(
    package: Package, data: Path, tmp_path: Path, name: str
) -> None:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), **PLANS[name])
    with ranks(
        2, [Run(tmp_path / "run", package, plan, data, {"checkpoint_every": 1})], tmp_path
    ) as started:
        for process in started:
            process.join(300)
        assert [process.exitcode for process in started] == [1, 1]
    for rank in range(2):
        assert (
            f"DivergedError: step {STEPS}: the gradient's norm is nan"
            in (tmp_path / f"rank-{rank}.log").read_text()
        )
    assert {
        each.data["step"] for each in read_events(tmp_path / "run") if each.kind == "checkpoint"
    } <= set(range(1, STEPS))


def test_every_rank_names_the_row_that_is_no_number(package: Package, tmp_path: Path) -> None:
    row = np.ones(8, np.float32)
    row[3] = np.nan
    data = written(tmp_path / "rows.npz", STEPS - 1, row)
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
    with ranks(2, [Run(tmp_path / "run", package, plan, data, {})], tmp_path) as started:
        for process in started:
            process.join(300)
    number = rows(SEED, ROWS * STEPS, ROWS * (STEPS - 1), 1)[0]
    for rank in range(2):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert f"step {STEPS}: the loss is nan (expected a finite number, got nan)" in log
        assert f"Check the data: the input 'x' is nan in row {number} of {data}." in log


def one_weight() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


@pytest.fixture(scope="module")
def steep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with a row in the first step at which the root has an infinite slope."""
    return written(
        tmp_path_factory.mktemp("steep") / "rows.npz",
        0,
        np.array([0, 1, 1, 1, 1, 1, 1, 1], np.float32),
    )


@pytest.fixture(scope="module")
def rooted(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen(tmp_path_factory.mktemp("roots"), one_weight(), root_of_sums)


def test_an_infinite_gradient_that_is_clipped_by_value_is_trained_on(
    rooted: Package, steep: Path, tmp_path: Path
) -> None:
    (step,) = alone(rooted, steep, tmp_path, steps=1, overrides=trainload.Overrides(clip_value=0.5))
    assert step["gradient_norm"] == float("inf")
    assert trainload.open(tmp_path / "out.tl").weights.tensor("weight").item() == pytest.approx(
        -0.5 * 0.01
    )


def test_an_infinite_gradient_that_is_not_clipped_ends_the_run(
    rooted: Package, steep: Path, tmp_path: Path
) -> None:
    with pytest.raises(DivergedError, match="step 1: the gradient's norm is inf"):
        alone(rooted, steep, tmp_path, steps=1)


def test_an_update_with_a_scaled_loss_is_left_out_and_the_run_goes_on(
    data: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    package = frozen(
        tmp_path,
        nn.Linear(8, 8, bias=False),
        norm_of_outputs,
        loss_scaling=trainload.LossScaling(init_scale=2.0),
    )
    steps = alone(package, data, tmp_path)
    assert [np.isfinite(step["gradient_norm"]) for step in steps] == [True, True, False]
    assert bool(trainload.open(tmp_path / "out.tl").weights.tensor("weight").isfinite().all())


@pytest.mark.slow
def test_of_several_updates_in_a_step_the_first_that_broke_is_named(tmp_path: Path) -> None:
    def part(name: str) -> Graph:
        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return norm_of_outputs(model.get_submodule(name), batch)

        return Graph(loss=loss, optimizer=lambda model: sgd(model.get_submodule(name)))

    torch.manual_seed(0)
    job = trainload.Job(
        model=nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("often", "once")}),
        batch={"x": 1 + torch.rand(ROWS, 8)},
        graphs={"often": part("often"), "once": part("once")},
        loop=[Turn("often", times=2, fresh=True), "once"],
        steps=1,
        global_batch=ROWS,
        seed=SEED,
    )
    package = trainload.freeze(job, tmp_path / "job.tl")
    with pytest.raises(DivergedError, match="step 1, graph often: the gradient's norm is nan"):
        # that of the first turn; "once" has a norm of 0
        alone(package, written(tmp_path / "rows.npz", 1, np.zeros(8, np.float32)), tmp_path)
