"""Clipping by value, weight averaging and loss scaling agree with those of a plain PyTorch loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.optimizer_jobs import (
    ROWS,
    STEPS,
    AutocastHalf,
    Eager,
    Half,
    Model,
    adam,
    data,
    eager,
    make_job,
    write_data,
)
from tests.laws.runs import TOLERANCE, Run, curve, difference, train
from tests.selection import selected

import trainload
from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json
from trainload.launching.run.journal import read_events
from trainload.launching.run.result import RunResult
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package
from trainload.sharding.plans.strategies import Strategy

HALF = STEPS // 2
TWO = trainload.Cluster(devices_per_node=2)
MEAN = trainload.Ema(decay=0.8)
SCALING = trainload.LossScaling(init_scale=2.0**22, growth_interval=4)
"""Loss scaling with an initial scale so large that the first gradients overflow.

The scale also grows at a step at which a resumed run that lost its growth counter would differ.
"""


def averaged() -> trainload.Job:
    return make_job(adam, ema=MEAN, clip_value=0.01)


def scaled(kind: type[Model] = Half) -> trainload.Job:
    return make_job(adam, kind, loss_scaling=SCALING, clip_norm=0.5, ema=MEAN)


PAIRS: list[tuple[str, Strategy]] = [
    ("averaged", "zero1"),
    ("averaged", "zero3"),
    ("scaled", "zero1"),
]
JOBS: dict[str, Callable[[], trainload.Job]] = {
    "averaged": averaged,
    "scaled": scaled,
    "scaled under autocast": functools.partial(scaled, AutocastHalf),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("rows") / "rows.npz")


@pytest.fixture(scope="module")
def packages(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Package]:
    folder = tmp_path_factory.mktemp("recipes")
    names = selected(request, "name") | {"averaged", "scaled"}
    return {
        name: trainload.freeze(make(), folder / f"{name}.tl")
        for name, make in JOBS.items()
        if name in names
    }


@pytest.fixture(scope="module")
def plain() -> dict[str, Eager]:
    return {name: eager(make()) for name, make in JOBS.items()}


@pytest.fixture(scope="module")
def pair(
    packages: dict[str, Package],
    rows: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """Folder of runs on two workers over half the steps."""
    folder = tmp_path_factory.mktemp("pair")
    wanted = sorted(selected(request, "case"))
    options = {"steps": HALF, "eval_data": str(rows)}
    train(
        2,
        [
            Run(
                folder / f"{n}-{s}", packages[n], trainload.plan(packages[n], TWO, s), rows, options
            )
            for n, s in wanted
        ],
        folder,
    )
    return folder


@pytest.fixture(scope="module")
def alone(
    packages: dict[str, Package], rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], RunResult]:
    """Job name -> its run on one worker, with an output and evaluations; run on first use."""

    @functools.cache
    def run(name: str) -> RunResult:
        folder = tmp_path_factory.mktemp("alone")
        return launched(packages[name], rows, folder)

    return run


def launched(package: Package, rows: Path, folder: Path, **options: Any) -> RunResult:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    given: dict[str, Any] = {
        "compile": False,
        "backend": "local",
        "output": folder / "trained.tl",
        "eval_data": rows,
        **options,
    }
    return trainload.launch(package, plan, rows, run_dir=folder / "run", **given)


def loss_of(model: torch.nn.Module) -> float:
    whole = data()
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(whole["x"]), whole["y"]).item()


def scales(run_dir: Path) -> list[float]:
    return [
        float(event.data["loss_scale"]) for event in read_events(run_dir) if event.kind == "step"
    ]


@pytest.mark.matrix("averaged-*", "scaled-*")
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("averaged", TOLERANCE), ("scaled", 2e-3), ("scaled under autocast", 2e-3)],
)
def test_a_run_has_the_losses_of_a_plain_loop(
    alone: Callable[[str], RunResult], plain: dict[str, Eager], name: str, tolerance: float
) -> None:
    assert difference(plain[name].losses, curve(Path(alone(name).run_dir))) <= tolerance


def test_the_mean_is_evaluated_and_written(
    alone: Callable[[str], RunResult], plain: dict[str, Eager]
) -> None:
    result, mean = alone("averaged"), plain["averaged"].mean
    assert result.output is not None and mean is not None
    weights = trainload.open(result.output).weights
    for name, parameter in mean.named_parameters():
        torch.testing.assert_close(weights.tensor(name), parameter.detach(), rtol=1e-5, atol=1e-6)
    assert result.evaluations[-1]["loss"] == pytest.approx(loss_of(mean), rel=1e-5)


def test_the_last_weights_are_evaluated_and_written_where_they_are_asked_for(
    packages: dict[str, Package], plain: dict[str, Eager], rows: Path, tmp_path: Path
) -> None:
    result = launched(packages["averaged"], rows, tmp_path, weights="last")
    weights = trainload.open(tmp_path / "trained.tl").weights
    for name, parameter in plain["averaged"].model.named_parameters():
        torch.testing.assert_close(weights.tensor(name), parameter.detach(), rtol=1e-4, atol=1e-5)
    assert result.evaluations[-1]["loss"] == pytest.approx(
        loss_of(plain["averaged"].model), rel=1e-5
    )


def test_the_scale_of_the_loss_moves_as_gradscalers_does(
    alone: Callable[[str], RunResult], plain: dict[str, Eager]
) -> None:
    found = scales(Path(alone("scaled").run_dir))
    assert found == plain["scaled"].scales
    assert any(a > b for a, b in pairwise(found)), "no gradient overflowed"
    assert any(a < b for a, b in pairwise(found)), "the scale never grew"


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRS, ids="-".join)
def test_two_workers_and_then_one_do_as_a_plain_loop(
    pair: Path,
    plain: dict[str, Eager],
    packages: dict[str, Package],
    rows: Path,
    case: tuple[str, Strategy],
) -> None:
    name, strategy = case
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


def test_a_package_without_them_has_no_word_of_them(
    packages: dict[str, Package], tiny: Package
) -> None:
    assert set(packages["scaled"].manifest.features) >= {"ema", "loss-scale"}
    fields = tiny.manifest.model_dump(mode="json")
    assert not {"clip_value", "ema_decay", "loss_scale"} & set(fields["recipe"])
    assert not any("shape" in update for update in fields["updates"])
    assert packages["averaged"].recipe.global_batch == ROWS
