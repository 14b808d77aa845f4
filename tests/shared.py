"""Makes once in a run of the suite, in whichever of its processes needs it first, what is slow to
make.
"""

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
"""The variable that names a folder which the runs of pytest of one `make test` share."""


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of this run of pytest share, with those of the other
    runs of `make test`.
    """
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this run, which `make` has filled in one of its processes. Nobody
    may change it.

    make: receives the folder, empty. Where it fails, the next process that asks tries again.
        Functions of other files may make other things of one name.
    """
    return _filled(factory, name, make, make)


def frozen_once(
    factory: pytest.TempPathFactory, name: str, job: Callable[[], trainload.Job]
) -> Package:
    """Return the package `name`.tl of a job, frozen once in this run, as `made_once` makes things.
    Nobody may change it.

    What every plan and every launch would derive of it anew, its evaluation's step graphs, is kept
    in it.

    job: a function, which is called where the package is not there yet.
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
    """Fill the folder of this name and of the file of the function that was given: conftest.py of
    every folder is the module `conftest`.
    """
    source = Path(inspect.getfile(given))
    place = run_folder(factory) / f"shared-{source.parent.name}-{source.stem}-{name}"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            draft = factory.mktemp(name)
            make(draft)
            draft.rename(place)
    return place
