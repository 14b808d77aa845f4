"""Untrained parameters are in separate files of a run's output.

The bytes of these files do not depend on the run, so a store has them once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.optimizer_jobs import frozen, make_job, write_data

import trainload
from trainload.packaging.package import Package
from trainload.packaging.stores.push import push

WEIGHTS = ("first.weight", "second.weight", "third.weight", "norm.weight", "last.weight")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("rows") / "rows.npz")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Package whose parameters are all trained."""
    return frozen(tmp_path_factory)


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Package of which only the last layer is trained."""
    job = make_job(
        lambda model: torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    )
    for name, parameter in job.model.named_parameters():
        parameter.requires_grad_(name.startswith("last."))
    return trainload.freeze(
        dataclasses.replace(job, schedule=None), tmp_path_factory.mktemp("partly") / "job.tl"
    )


def trained(package: Package, rows: Path, folder: Path, seed: int = 0, **overrides: Any) -> Package:
    """Train the package for two steps, and return the output."""
    changes = trainload.Overrides(seed=seed, **overrides)
    result = trainload.launch(
        package,
        trainload.plan(changes.apply(package), trainload.Cluster(), "single"),
        rows,
        run_dir=folder / f"run-{seed}",
        steps=2,
        backend="local",
        compile=False,
        output=folder / f"{seed}.tl",
        overrides=changes,
    )
    assert result.output is not None
    return trainload.open(result.output)


def files(package: Package, names: tuple[str, ...]) -> dict[str, str]:
    """Return parameter name -> digest of the file that contains it."""
    return {
        name: package.manifest.files[package.stored_weights.file(name)].sha256 for name in names
    }


def test_a_freeze_puts_what_is_not_trained_into_files_of_its_own(partly: Package) -> None:
    homes = {name: partly.stored_weights.file(name) for name in partly.stored_weights.names()}
    last = {homes.pop(name) for name in ("last.weight", "last.bias")}
    assert len(last) == 1 and last.isdisjoint(homes.values())


def test_a_run_leaves_the_files_of_what_it_does_not_train(
    partly: Package, rows: Path, tmp_path: Path
) -> None:
    new = trained(partly, rows, tmp_path)
    assert {
        name
        for name, digest in files(new, WEIGHTS).items()
        if digest != files(partly, WEIGHTS)[name]
    } == {"last.weight"}


def test_a_store_is_sent_what_was_trained(partly: Package, rows: Path, tmp_path: Path) -> None:
    push(partly.path, tmp_path / "store", line="line")
    report = push(trained(partly, rows, tmp_path).path, tmp_path / "store", line="line")
    weights = {
        path: entry.size
        for path, entry in partly.manifest.files.items()
        if path.endswith(".safetensors")
    }
    kept = weights[partly.stored_weights.file("first.weight")]
    assert report.sent_bytes < sum(entry.size for entry in partly.manifest.files.values()) - kept


@pytest.mark.matrix("frozen")
@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        pytest.param(
            {"frozen": ("first.*", "second.*", "third.*", "norm.*")}, {"last.weight"}, id="frozen"
        ),
        pytest.param(
            {"adapters": trainload.Adapters(rank=2, layers=("second.weight",))},
            {"second.weight"},
            id="adapters",
        ),
        pytest.param(
            {"adapters": trainload.Adapters(rank=2, layers=("second.weight",), also=("norm.*",))},
            {"second.weight", "norm.weight"},
            id="adapters and others",
        ),
    ],
)
def test_what_a_launch_does_not_train_is_one_file_whatever_the_run(
    package: Package, rows: Path, tmp_path: Path, overrides: dict[str, Any], changed: set[str]
) -> None:
    one, other = (
        files(trained(package, rows, tmp_path, seed, **overrides), WEIGHTS) for seed in (1, 2)
    )
    assert {name for name in WEIGHTS if one[name] != other[name]} == changed


def test_what_is_all_trained_is_in_one_part(package: Package) -> None:
    assert set(files(package, package.stored_weights.names()).values()) == {
        package.manifest.files["weights/model-00001-of-00001.safetensors"].sha256
    }
