"""The package that is attacked and mutated, with every kind of file."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.hostile.packages import KEY
from tests.packaging.jobs import make_job

from trainload.autograd_trace.derivation.aot import derive
from trainload.packaging.derived import write_derived
from trainload.packaging.write import write_package


def make_base(folder: Path) -> Path:
    """Write the package of tests/packaging/jobs.py to `folder`, with its joint graph.

    The joint graph is sealed with the key of the environment's user.
    """
    (folder / "LICENSE").write_text("do as you like\n")
    job = make_job()
    assets = {"LICENSE": folder / "LICENSE"}
    package = write_package(
        folder / "base.tl", job.program, job.updates, job.recipe, assets=assets, max_shard=600
    )
    write_derived(package, KEY, derive(package.program(), "train", torch.device("cpu")))
    return package.path
