"""Fixtures for the tests of exports."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.export.jobs import small_job
from tests.laws.isolated import Environment, make_plain_environment

import trainload
from trainload.capture.job.definition import AssetLike
from trainload.packaging.package import Package


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A Python environment with torch and transformers, without trainload and without a network."""
    return make_plain_environment(
        tmp_path_factory.mktemp("outside") / "venv", "torch", "transformers"
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of a small job after three steps, as written by `launch`."""
    folder = tmp_path_factory.mktemp("trained")
    rows = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    np.savez(folder / "rows.npz", x=rows, scale=rows[:, :1])
    assets: dict[str, AssetLike] = {
        "LICENSE": b"as you like\n",
        "notes/run.log": trainload.Asset(b"first\n", "text/plain"),
    }
    package = trainload.freeze(dataclasses.replace(small_job(), assets=assets), folder / "small.tl")
    plan = trainload.plan(package, trainload.Cluster(), "single")
    output = folder / "trained.tl"
    trainload.launch(
        package,
        plan,
        folder / "rows.npz",
        run_dir=folder / "run",
        steps=3,
        backend="local",
        compile=False,
        output=output,
    )
    return trainload.open(output)
