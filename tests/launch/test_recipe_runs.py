"""Clipping by value, the running mean and the scaled loss are those of torch's own parts in a plain loop."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.optimizer_jobs import ROWS, STEPS, Eager, Half, adam, data, eager, make_job, write_data
from tests.laws.runs import TOLERANCE, Run, curve, difference, train

import trainload
from trainload.launch.journal import read_events
from trainload.launch.result import RunResult
from trainload.launch.spec import RUN_FILE, read_spec, replace_file
from trainload.packaging.canonical import canonical_json
from trainload.packaging.read import Package
from trainload.sharding.strategies import Strategy

HALF = STEPS // 2
TWO = trainload.Cluster(devices_per_node=2)
MEAN = trainload.Ema(decay=0.8)
SCALING = trainload.LossScaling(init_scale=2.0**22, growth_interval=4)
"""So large that the first gradients are not finite, and growing while a resumed run would have lost count."""


def averaged(**options: Any) -> trainload.Job:
    return make_job(adam, ema=MEAN, clip_value=0.01, **options)


def scaled(**options: Any) -> trainload.Job:
    return make_job(adam, Half, loss_scaling=SCALING, clip_norm=0.5, ema=MEAN, **options)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("rows") / "rows.npz")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Package]:
    folder = tmp_path_factory.mktemp("recipes")
    return {name: trainload.freeze(make(), folder / f"{name}.tl") for name, make in {"averaged": averaged, "scaled": scaled}.items()}


@pytest.fixture(scope="module")
def plain() -> dict[str, Eager]:
    return {"averaged": eager(averaged()), "scaled": eager(scaled())}


@pytest.fixture(scope="module")
def pair(packages: dict[str, Package], rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs on two workers, of half the steps."""
    folder = tmp_path_factory.mktemp("pair")
    wanted: list[tuple[str, Strategy]] = [("averaged", "zero1"), ("averaged", "zero3"), ("scaled", "zero1")]
    options = {"steps": HALF, "eval_data": str(rows)}
    train(2, [Run(folder / f"{n}-{s}", packages[n], trainload.plan(packages[n], TWO, s), rows, options) for n, s in wanted], folder)
    return folder


def alone(package: Package, rows: Path, folder: Path, **options: Any) -> RunResult:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    return trainload.launch(package, plan, rows, run_dir=folder / "run", compile=False, backend="local", **options)


def loss_of(model: torch.nn.Module) -> float:
    whole = data()
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(whole["x"]), whole["y"]).item()


def scales(run_dir: Path) -> list[float]:
    return [float(event.data["loss_scale"]) for event in read_events(run_dir) if event.kind == "step"]


@pytest.mark.parametrize(("name", "tolerance"), [("averaged", TOLERANCE), ("scaled", 2e-3)])
def test_a_run_has_the_losses_of_a_plain_loop(
    packages: dict[str, Package], plain: dict[str, Eager], rows: Path, tmp_path: Path, name: str, tolerance: float
) -> None:
    alone(packages[name], rows, tmp_path)
    assert difference(plain[name].losses, curve(tmp_path / "run")) <= tolerance


def test_the_mean_is_evaluated_and_written(packages: dict[str, Package], plain: dict[str, Eager], rows: Path, tmp_path: Path) -> None:
    result = alone(packages["averaged"], rows, tmp_path, output=tmp_path / "trained.tl", eval_data=rows)
    mean = plain["averaged"].mean
    assert mean is not None
    weights = trainload.open(tmp_path / "trained.tl").weights
    for name, parameter in mean.named_parameters():
        torch.testing.assert_close(weights.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-6)
    assert result.evaluations[-1]["loss"] == pytest.approx(loss_of(mean), rel=1e-5)


def test_the_last_weights_are_evaluated_and_written_where_they_are_asked_for(
    packages: dict[str, Package], plain: dict[str, Eager], rows: Path, tmp_path: Path
) -> None:
    result = alone(packages["averaged"], rows, tmp_path, output=tmp_path / "trained.tl", eval_data=rows, weights="last")
    weights = trainload.open(tmp_path / "trained.tl").weights
    for name, parameter in plain["averaged"].model.named_parameters():
        torch.testing.assert_close(weights.tensor(name), parameter.detach(), rtol=1e-4, atol=1e-5)
    assert result.evaluations[-1]["loss"] == pytest.approx(loss_of(plain["averaged"].model), rel=1e-5)


def test_the_scale_of_the_loss_moves_as_gradscalers_does(
    packages: dict[str, Package], plain: dict[str, Eager], rows: Path, tmp_path: Path
) -> None:
    alone(packages["scaled"], rows, tmp_path)
    found = scales(tmp_path / "run")
    assert found == plain["scaled"].scales
    assert any(a > b for a, b in pairwise(found)), "no gradient overflowed"
    assert any(a < b for a, b in pairwise(found)), "the scale never grew"


@pytest.mark.parametrize(("name", "strategy"), [("averaged", "zero1"), ("averaged", "zero3"), ("scaled", "zero1")])
def test_two_workers_and_then_one_do_as_a_plain_loop(
    pair: Path, plain: dict[str, Eager], packages: dict[str, Package], rows: Path, name: str, strategy: str
) -> None:
    run = pair / f"{name}-{strategy}"
    tolerance = TOLERANCE if name == "averaged" else 2e-3
    assert difference(plain[name].losses[:HALF], curve(run)) <= tolerance
    output = pair / f"{name}-{strategy}.tl"
    spec = read_spec(run).model_copy(update={"steps": STEPS, "output": str(output)})
    replace_file(run / RUN_FILE, canonical_json(spec.model_dump(mode="json")))
    result = trainload.resume(run, workers=1, backend="local")
    assert difference(plain[name].losses, curve(run)) <= tolerance
    mean = plain[name].mean
    assert mean is not None
    assert result.evaluations[-1]["loss"] == pytest.approx(loss_of(mean), rel=max(tolerance, 1e-5))
    if name == "scaled":
        assert scales(run) == plain[name].scales


def test_a_package_without_them_has_no_word_of_them(packages: dict[str, Package], gpt: Package) -> None:
    assert set(packages["scaled"].manifest.features) >= {"ema", "loss-scale"}
    fields = gpt.manifest.model_dump(mode="json")
    assert not {"clip_value", "ema_decay", "loss_scale"} & set(fields["recipe"])
    assert not any("shape" in update for update in fields["updates"])
    assert packages["averaged"].recipe.global_batch == ROWS
