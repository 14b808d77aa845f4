"""A small package, days of data for it, and a line that was retrained on them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.retraining.ticking import config_of, tick
from tests.shared import frozen_once
from torch import nn
from torch.nn import functional

import trainload
from trainload.cli import main as cli
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> trainload.Loss:
    logits = model(batch["x"])
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == batch["cls"]).float().mean()
    return trainload.Loss(
        functional.cross_entropy(logits, batch["cls"]), metrics={"accuracy": accuracy}
    )


def classifier(width: int = 8) -> trainload.Job:
    torch.manual_seed(0)
    return trainload.Job(
        model=nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)),
        batch={"x": torch.randn(4, 4), "cls": torch.tensor([0, 1, 2, 0])},
        loss=loss,
        predict=lambda model, batch: model(batch["x"]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        steps=6,
        global_batch=8,
    )


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A frozen classifier of four numbers. No test changes it."""
    return frozen_once(tmp_path_factory, "small", classifier)


@pytest.fixture(scope="session")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The same classifier with a wider layer. No test changes it."""
    return frozen_once(tmp_path_factory, "wider", lambda: classifier(width=12))


def write_day(
    path: Path, rows: int = 40, seed: int = 0, shift: float = 0.0, **columns: object
) -> Path:
    """Write rows of three classes, clustered around one point each.

    `columns` are added, or replace a column; None removes it.
    """
    draw = np.random.default_rng(seed)
    classes = draw.integers(0, 3, rows)
    points = np.eye(4, dtype=np.float32)[classes] * 3
    values = points + draw.normal(shift, 0.5, (rows, 4))
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {"x": values.astype(np.float32), "cls": classes.astype(np.int64), **columns}
    trainload.write_rows(
        [{name: value for name, value in given.items() if value is not None}], path
    )
    return path


@pytest.fixture
def folder(small: Package, tmp_path: Path) -> Path:
    write_day(tmp_path / "data" / "0.arrow", rows=60)
    return tmp_path


@pytest.fixture(scope="session")
def lived(small: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line of three ticks: promoted, no new data, promoted. No test changes it."""
    folder = tmp_path_factory.mktemp("lived")
    config = config_of(folder, small)
    write_day(folder / "data" / "0.arrow", rows=120)
    tick(config, 0)
    tick(config, 1)
    write_day(folder / "data" / "2.arrow", rows=120, seed=2, shift=0.6)
    tick(config, 2)
    return folder


@pytest.fixture
def store(lived: Path, tmp_path: Path) -> Store:
    """A copy of the line's store."""
    shutil.copytree(lived / "store", tmp_path / "store")
    return Store(tmp_path / "store")


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command line. Returns its exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.run(list(arguments))
        said = capsys.readouterr()
        return status, said.out, said.err

    monkeypatch.setenv("COLUMNS", "200")
    return run
