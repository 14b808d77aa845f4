"""Create slow test data once per run of the suite, in the first process that needs it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import trainload
from trainload.freezing.prove import keep_steps
from trainload.packaging.package import Package
from trainload.sharding.plans.device_step_graphs import step_graphs

SHARED = "SHARED_FOLDER"
"""Environment variable with the folder that the pytest runs of one `make test` share."""


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of this pytest run share.

    All pytest runs of one `make test` have the same folder.
    """
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this run, which `make` has filled in one of its processes.

    The folder must not be changed.

    make: receives the empty folder. If it fails, the next process that needs the folder tries
        again. Functions of different files may use the same name.
    """
    return _filled(factory, name, make, make)


def frozen_once(
    factory: pytest.TempPathFactory, name: str, job: Callable[[], trainload.Job]
) -> Package:
    """Return the package `name`.tl of a job, frozen once in this run.

    It must not be changed. The step graphs of its evaluation are stored in it, so that plans and
    launches do not derive them again.

    job: called if the package does not exist yet.
    """

    def make(folder: Path) -> None:
        package = trainload.freeze(job(), folder / f"{name}.tl")
        steps, trained = (
            step_graphs(package, torch.device("cpu")),
            package.manifest.training_graphs(),
        )
        keep_steps(package, {graph: step for graph, step in steps.items() if graph not in trained})

    return trainload.open(_filled(factory, name, job, make) / f"{name}.tl")


def _filled(
    factory: pytest.TempPathFactory,
    name: str,
    given: Callable[..., object],
    make: Callable[[Path], object],
) -> Path:
    """Fill the folder of this name and of the file that defines `given`.

    The file is part of the key because the conftest.py of every folder is the module `conftest`.
    """
    source = Path(inspect.getfile(given))
    place = run_folder(factory) / f"shared-{source.parent.name}-{source.stem}-{name}"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            draft = factory.mktemp(name)
            make(draft)
            draft.rename(place)
    return place
