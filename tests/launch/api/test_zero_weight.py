"""Rows without weight in the loss: a microbatch of such rows adds nothing.

An update without weight is skipped and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.laws.runs import Run, ranks
from torch import Tensor, nn, optim
from torch.nn import functional

import trainload
from trainload.core.errors import DataError
from trainload.launching.data.sampler import rows
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Shard

ROWS, STEPS, SEED, SKIPPED = 8, 4, 3, 2
CLASSES = 8
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"strategy": "single"},
    "microbatches": {"strategy": "single", "accumulate": 4},
    "zero0": {"strategy": "zero0"},
    "zero3 and microbatches": {"strategy": "zero3", "accumulate": 2},
    "a tensor axis": {
        "tensor_ranks": 2,
        "tensor_rules": {"0.weight": Shard(dim=0), "2.weight": Shard(dim=1)},
    },
    "a pipeline": {"pipeline_ranks": 2, "accumulate": 2},
    "a pipeline that divides backward": {
        "pipeline_ranks": 2,
        "schedule": "zero-bubble",
        "accumulate": 4,
    },
}


def by_division(model: nn.Module, batch: dict[str, Tensor]) -> trainload.Loss:
    """Return the usual mean over labelled rows. Without labels, it and its gradient are 0 / 0."""
    labels = batch["label"].long()
    counted = (labels >= 0).float()
    each = functional.cross_entropy(model(batch["x"]), labels.clamp(min=0), reduction="none")
    mean = (each * counted).sum() / counted.sum()
    return trainload.Loss(
        mean,
        weight=counted.sum(),
        metrics={"error": (each.detach() * counted).sum() / counted.sum()},
    )


def by_index(model: nn.Module, batch: dict[str, Tensor]) -> trainload.Loss:
    """Return the same mean, computed by cross_entropy with an ignored label."""
    labels = batch["label"].long()
    loss = functional.cross_entropy(model(batch["x"]), labels, ignore_index=-1)
    return trainload.Loss(loss, weight=(labels >= 0).sum(), metrics={"error": loss.detach()})


def adamw(model: nn.Module) -> optim.Optimizer:
    """Return an optimizer whose momentum and weight decay expose an update that is not skipped."""
    return optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def frozen(loss: Callable[..., trainload.Loss], folder: Path) -> Package:
    batch = {"x": torch.rand(4, 8), "label": torch.tensor([1, 2, -1, 3])}
    job = trainload.Job(
        model=network(),
        batch=batch,
        loss=loss,
        optimizer=adamw,
        steps=STEPS,
        global_batch=ROWS,
        seed=SEED,
    )
    return trainload.freeze(job, folder / "job.tl")


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen(by_division, tmp_path_factory.mktemp("divided"))


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return frozen(by_index, tmp_path_factory.mktemp("indexed"))


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """Data with missing labels.

    The first half of step 0, the second half of step 1 except for one row, and all of step 2 have
    none.
    """
    generator = np.random.default_rng(0)
    label = generator.integers(0, CLASSES, ROWS * STEPS)
    order = rows(SEED, ROWS * STEPS, 0, ROWS * STEPS)
    label[order[: ROWS // 2]] = -1
    label[order[ROWS + ROWS // 2 : 2 * ROWS - 1]] = -1
    label[order[SKIPPED * ROWS : (SKIPPED + 1) * ROWS]] = -1
    return {"x": generator.random((ROWS * STEPS, 8), dtype=np.float32), "label": label}


@pytest.fixture(scope="module")
def data(table: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labels") / "rows.npz"
    np.savez(path, **table)
    return path


@pytest.fixture(scope="module")
def eager(table: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) of a loop over labelled rows that skips steps without any."""
    model = network()
    optimizer = adamw(model)
    order = rows(SEED, ROWS * STEPS, 0, ROWS * STEPS)
    steps: dict[int, tuple[float, float]] = {}
    for step in range(STEPS):
        own = order[step * ROWS : (step + 1) * ROWS]
        own = own[table["label"][own] >= 0]
        if len(own):
            optimizer.zero_grad()
            loss = functional.cross_entropy(
                model(torch.from_numpy(table["x"][own])), torch.from_numpy(table["label"][own])
            )
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            norm = torch.cat(
                [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            ).norm()
            optimizer.step()
            steps[step] = (loss.item(), norm.item())
    return steps


def trained(world: int, run: Run, folder: Path) -> dict[int, dict[str, Any]]:
    """Train a run to its end; return step -> the data of its event in the journal."""
    with ranks(world, [run], folder) as started:
        for process in started:
            process.join(300)
        assert [process.exitcode for process in started] == [0] * world, (
            folder / "rank-0.log"
        ).read_text()
    return {
        event.data["step"]: dict(event.data)
        for event in read_events(run.run_dir)
        if event.kind == "step"
    }


def test_the_reference_skips_one_step(eager: dict[int, tuple[float, float]]) -> None:
    assert sorted(eager) == [0, 1, 3]


@pytest.mark.matrix("zero3 and microbatches-divided", "a pipeline that divides backward-divided")
@pytest.mark.parametrize("loss", ["divided", "indexed"])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_computes_the_mean_over_what_has_weight(
    request: pytest.FixtureRequest,
    data: Path,
    eager: dict[int, tuple[float, float]],
    tmp_path: Path,
    name: str,
    loss: str,
) -> None:
    package: Package = request.getfixturevalue(loss)
    world = 1 if PLANS[name].get("strategy") == "single" else 2
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=world), **PLANS[name])
    steps = trained(world, Run(tmp_path / "run", package, plan, data), tmp_path)
    assert sorted(steps) == sorted(eager)
    for step, (wanted, norm) in eager.items():
        assert steps[step]["loss"] == pytest.approx(wanted, rel=1e-5)
        assert steps[step]["metrics"]["error"] == pytest.approx(wanted, rel=1e-5)
        assert steps[step]["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def launched(package: Package, data: Path, folder: Path, **options: Any) -> trainload.RunResult:
    plan = trainload.plan(package, trainload.Cluster(), "single", accumulate=2)
    return trainload.launch(
        package,
        plan,
        data,
        run_dir=folder / "run",
        backend="local",
        **{"compile": False, **options},
    )


@pytest.mark.slow
def test_compiled_graphs_leave_out_the_same(
    divided: Package, data: Path, eager: dict[int, tuple[float, float]], tmp_path: Path
) -> None:
    launched(divided, data, tmp_path, compile=True)
    steps = {
        event.data["step"]: event.data
        for event in read_events(tmp_path / "run")
        if event.kind == "step"
    }
    assert {step: data["loss"] for step, data in steps.items()} == pytest.approx(
        {step: loss for step, (loss, _) in eager.items()}, rel=1e-5
    )


def test_a_skipped_update_is_reported(divided: Package, data: Path, tmp_path: Path) -> None:
    launched(divided, data, tmp_path)
    (warning,) = [
        event.data["message"] for event in read_events(tmp_path / "run") if event.kind == "warning"
    ]
    assert (
        f"step {SKIPPED + 1}: the update was skipped, because the weight of its batch is 0"
        in warning
    )


def write(folder: Path, labels: list[int]) -> Path:
    np.savez(
        folder / "rows.npz",
        x=np.random.default_rng(1).random((len(labels), 8), dtype=np.float32),
        label=np.array(labels),
    )
    return folder / "rows.npz"


def evaluated(package: Package, data: Path) -> trainload.EvaluationResult:
    return trainload.evaluate(
        package,
        trainload.plan(package, trainload.Cluster(), "single", accumulate=2),
        data,
        backend="local",
        compile=False,
    )


def test_evaluation_is_over_the_rows_that_have_weight(divided: Package, tmp_path: Path) -> None:
    found = evaluated(divided, write(tmp_path, [1, -1, 3, 4, -1, -1, -1, -1]))
    assert found.loss == pytest.approx(evaluated(divided, write(tmp_path, [1, -1, 3, 4])).loss)


def test_evaluation_of_rows_without_weight_is_an_error(divided: Package, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the total weight of the 4 evaluated held-out rows is 0"):
        evaluated(divided, write(tmp_path, [-1] * 4))
