"""Runs with optimizers that update whole parameters reproduce a plain loop.

This holds on any number of workers and across checkpoints.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lion_pytorch import Lion
from tests.launch.optimizer_jobs import (
    STEPS,
    Damped,
    OwnBackward,
    eager,
    factored,
    make_job,
    muon,
    preconditioned,
    write_data,
)
from tests.laws.runs import TOLERANCE, Run, curve, difference, train

import trainload
from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json
from trainload.launching.run.run_directory import RUN_FILE
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package

pytestmark = pytest.mark.slow

HALF = STEPS // 2
TWO = trainload.Cluster(devices_per_node=2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("rows") / "rows.npz")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(make_job(factored), tmp_path_factory.mktemp("factored") / "job.tl")


@pytest.fixture(scope="module")
def muon_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(make_job(muon), tmp_path_factory.mktemp("muon") / "job.tl")


def alone(package: Package, rows: Path, folder: Path, **options: Any) -> list[float]:
    """Train with one worker in this process, and return the losses."""
    plan = trainload.plan(package, trainload.Cluster(), "single")
    given: dict[str, Any] = {"compile": False, "backend": "local", **options}
    trainload.launch(package, plan, rows, run_dir=folder / "run", **given)
    return curve(folder / "run")


@pytest.fixture(scope="module")
def reference() -> list[float]:
    return eager(make_job(factored)).losses


@pytest.fixture(scope="module")
def pair(
    package: Package, muon_package: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of runs on two workers over half the steps."""
    folder = tmp_path_factory.mktemp("pair")
    plans = {
        "zero1": trainload.plan(package, TWO, "zero1", bucket_bytes=400),
        "zero3": trainload.plan(package, TWO, "zero3"),
    }
    runs = [
        Run(folder / name, package, plan, rows, {"steps": HALF}) for name, plan in plans.items()
    ]
    runs += [
        Run(
            folder / "muon",
            muon_package,
            trainload.plan(muon_package, TWO, "zero3"),
            rows,
            {"steps": HALF},
        )
    ]
    nested = trainload.freeze(make_job(preconditioned), folder / "nested.tl")
    runs += [
        Run(folder / "nested", nested, trainload.plan(nested, TWO, "zero3"), rows, {"steps": HALF})
    ]
    train(2, runs, folder)
    return folder


def test_a_run_has_the_losses_and_weights_of_a_plain_loop(
    package: Package, rows: Path, tmp_path: Path
) -> None:
    plain = eager(make_job(factored))
    assert (
        difference(plain.losses, alone(package, rows, tmp_path, output=tmp_path / "trained.tl"))
        <= TOLERANCE
    )
    weights = trainload.open(tmp_path / "trained.tl").weights
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(weights.tensor(name), parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_two_workers_have_the_losses_of_a_plain_loop(
    pair: Path, reference: list[float], strategy: str
) -> None:
    assert difference(reference[:HALF], curve(pair / strategy)[:HALF]) <= TOLERANCE


def test_muon_on_two_workers_has_the_losses_of_a_plain_loop(pair: Path) -> None:
    losses = eager(make_job(muon)).losses
    # Muon multiplies matrices in bfloat16
    assert difference(losses[:HALF], curve(pair / "muon")) <= 1e-3


def test_state_in_lists_on_two_workers_has_the_losses_of_a_plain_loop(pair: Path) -> None:
    assert (
        difference(eager(make_job(preconditioned)).losses[:HALF], curve(pair / "nested"))
        <= TOLERANCE
    )


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_checkpoint_of_two_workers_continues_on_one(
    pair: Path, reference: list[float], strategy: str
) -> None:
    run = pair / strategy
    spec = read_spec(run).model_copy(update={"steps": STEPS})
    replace_file(run / RUN_FILE, canonical_json(spec.model_dump(mode="json")))
    trainload.resume(run, workers=1, backend="local")
    assert difference(reference, curve(run)) <= TOLERANCE


def test_the_plan_says_what_is_updated_whole(package: Package, muon_package: Package) -> None:
    assert all(b.whole for b in trainload.plan(package, TWO, "zero3").buckets)
    plan = trainload.plan(muon_package, TWO, "zero3")
    assert [[s.parameter for s in b.slots] for b in plan.buckets if b.whole] == [
        ["second.weight", "third.weight"]
    ]
    hidden = next(b.length for b in plan.buckets if b.whole) * 4
    assert plan.estimate.gathered_bytes >= 3 * hidden  # parameters, gradients, momentum


CHILD = """
import json, sys
sys.modules["lion_pytorch"] = None
import trainload
package = trainload.open(sys.argv[1])
plan = trainload.plan(package, trainload.Cluster(), "single")
trainload.launch(package, plan, sys.argv[2], run_dir="run", backend="local", compile=False)
foreign = ("lion_pytorch", "tests")
known = [name for name, module in sys.modules.items() if name.startswith(foreign) and module]
print(json.dumps({"known": known, "optimizer": package.recipe.optimizer}))
"""


def test_optimizers_and_an_autograd_function_train_where_they_cannot_be_imported(
    rows: Path, tmp_path: Path
) -> None:

    def both(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [
            Lion([p for p in parameters if p.ndim > 1], lr=1e-3, weight_decay=0.1),
            Damped([p for p in parameters if p.ndim == 1]),
        ]

    package = trainload.freeze(make_job(both, OwnBackward), tmp_path / "job.tl")
    command = [sys.executable, "-c", CHILD, str(package.path), str(rows)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"known": [], "optimizer": "Lion + Damped"}
    assert (
        difference(eager(make_job(both, OwnBackward)).losses, curve(tmp_path / "run")) <= TOLERANCE
    )
