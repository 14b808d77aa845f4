"""Outputs that one graph feeds to another may have any strides.

The receiving graph was derived for contiguous rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import trainload
from trainload import Graph
from trainload.launching.run.journal import losses, read_events
from trainload.packaging.package import Package

ROWS, STEPS = 6, 2


def teach(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return targets, (rows, 4, 3), a non-contiguous view of (rows, 3, 4)."""
    return {
        "wanted": model.get_submodule("teacher")(batch["x"]).unflatten(1, (3, 4)).transpose(1, 2)
    }


def learn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss that views the fed tensor in a shape that the tensor's strides do not allow."""
    wanted = batch["wanted"].reshape(len(batch["x"]), -1)
    found: Tensor = (
        (model.get_submodule("student")(batch["x"]) - wanted * wanted.view(-1, 12).sigmoid())
        .square()
        .mean()
    )
    return found


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.get_submodule("student").parameters(), lr=0.1)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"teacher": nn.Linear(5, 12), "student": nn.Linear(5, 12)})
    model["teacher"].requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    graphs = {
        "teach": Graph(compute=teach),
        "learn": Graph(loss=learn, feeds={"wanted": "teach.wanted"}, optimizer=sgd),
    }
    job = trainload.Job(
        network(),
        {"x": torch.randn(4, 5)},
        None,
        loss=None,
        graphs=graphs,
        steps=STEPS,
        global_batch=ROWS,
    )
    return trainload.freeze(job, tmp_path_factory.mktemp("fed") / "job.tl")


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["interpreted", "compiled"]
)
def test_a_run_has_the_losses_of_a_plain_loop(
    package: Package, tmp_path: Path, compiled: bool
) -> None:
    x = np.random.default_rng(0).standard_normal((1, 5), dtype=np.float32).repeat(ROWS * STEPS, 0)
    np.savez(tmp_path / "rows.npz", x=x)
    plan = trainload.plan(package, trainload.Cluster(), "single", accumulate=2)
    trainload.launch(
        package,
        plan,
        tmp_path / "rows.npz",
        run_dir=tmp_path / "run",
        backend="local",
        compile=compiled,
    )
    model = network()
    optimizer, expected = sgd(model), []
    for _ in range(STEPS):
        batch = {"x": torch.from_numpy(x[:ROWS])}
        with torch.no_grad():
            wanted = teach(model, batch)["wanted"].contiguous()
        loss = learn(model, {**batch, "wanted": wanted})
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        expected.append(loss.item())
    assert losses(read_events(tmp_path / "run")) == pytest.approx(expected, rel=1e-5)
