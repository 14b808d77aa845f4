"""A package with nested inputs is frozen, and trained without their types.

The data files have dotted column names.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.ranks import ran
from torch import nn

import trainload
from trainload.core.canonical_json import parse_canonical
from trainload.freezing.load_job import load_job
from trainload.packaging.format.entries import graph_specs
from trainload.packaging.package import Package

NAMES = ("mask.left", "pair.0", "pair.1")

JOB = """
from dataclasses import dataclass

import torch
import trainload


@dataclass
class Mask:
    left: torch.Tensor
    right: torch.Tensor | None = None


def loss(model, batch):
    inputs, targets = batch["pair"]
    off = (model(inputs) - targets) * batch["mask"].left[:, None] * batch["scale"]
    return off.square().mean()


def job():
    torch.manual_seed(0)
    return trainload.Job(
        model=torch.nn.Linear(3, 2),
        batch={
            "pair": (torch.randn(2, 3), torch.randn(2, 2)),
            "mask": Mask(torch.ones(2)),
            "scale": 0.5,
        },
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        steps=4,
        global_batch=4,
    )
"""


def train_without_the_types(path: Path, *files: Path) -> None:
    """Train the package on each file, and print the first losses."""
    assert importlib.util.find_spec("nested_job") is None
    package = trainload.open(path)
    plan = trainload.plan(package, trainload.Cluster(), "single")
    for data in files:
        print(
            trainload.launch(
                package,
                plan,
                data,
                run_dir=data.with_suffix(f"{data.suffix}.run"),
                backend="local",
                compile=False,
            ).first_loss
        )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("nested")
    (folder / "nested_job.py").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        return trainload.freeze(load_job(f"{folder / 'nested_job.py'}:job"), folder / "nested.tl")


def rows(count: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(0)
    shapes = {"mask.left": (count,), "pair.0": (count, 3), "pair.1": (count, 2)}
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def test_the_packages_inputs_are_the_dotted_names(package: Package) -> None:
    inputs, _ = graph_specs(package.manifest.graphs["train"])
    assert [(i.name, i.shape) for i in inputs] == [
        ("mask.left", ("batch",)),
        ("pair.0", ("batch", 3)),
        ("pair.1", ("batch", 2)),
    ]


def test_the_constants_are_recorded(package: Package) -> None:
    record = parse_canonical((package.path / "debug/batch.json").read_bytes(), "debug/batch.json")
    assert record["constants"] == {"mask.right": None, "scale": "0.5"}
    assert record["fixes"] == []


def test_a_process_without_the_types_trains_it_from_dotted_columns(
    package: Package, tmp_path: Path
) -> None:
    columns = rows(4)  # rows of one step
    np.savez(tmp_path / "rows.npz", **columns)  # type: ignore[arg-type]  # the stub treats the columns as flags
    pq.write_table(
        pa.table({name: list(values) for name, values in columns.items()}),
        tmp_path / "rows.parquet",
    )
    status, told = ran(
        train_without_the_types,
        package.path,
        tmp_path / "rows.npz",
        tmp_path / "rows.parquet",
        cwd=tmp_path,
    )
    assert status == 0, told
    mask, inputs, targets = (torch.from_numpy(columns[name]) for name in NAMES)
    eager = nn.functional.linear(
        inputs, package.weights.tensor("weight"), package.weights.tensor("bias")
    )
    expected = ((eager - targets) * mask[:, None] * 0.5).square().mean().item()
    assert [float(line) for line in told.split()] == pytest.approx([expected, expected], rel=1e-5)
