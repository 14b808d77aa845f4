"""The package that is attacked: with a derived graph, made here."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.hostile.packages import KEY

from trainload.autograd_trace.aot import derive
from trainload.packaging.derived import write_derived
from trainload.packaging.read import open_package


def prepare(folder: Path) -> None:
    """Put the joint graph of the package in `folder` beside it."""
    package = open_package(folder)
    write_derived(package, KEY, derive(package.program(), "train", torch.device("cpu")))
