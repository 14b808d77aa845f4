"""An operator that changes nothing; in one process it gets stuck while a file says so, or computes
NaN once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

STUCK = "TRAINLOAD_FAULTS_STUCK"
"""The environment variable with a file's path; the process whose pid the file has gets stuck: a
rank that hangs outside any collective.
"""
BROKEN = "TRAINLOAD_FAULTS_BROKEN"
"""The same; the process computes NaN, and the file is gone."""
PACE = "TRAINLOAD_FAULTS_PACE"
"""Seconds that a call takes at least, so that steps are as long as those of a larger model; 0.05
where nothing is said.
"""


def _named(variable: str) -> Path | None:
    """The file, if it names this process."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_file() and path.read_text() == str(os.getpid()) else None


@torch.library.custom_op("faults::through", mutates_args=())
def through(x: torch.Tensor) -> torch.Tensor:
    """A copy."""
    time.sleep(float(os.environ.get(PACE, "0.05")))
    while _named(STUCK):
        time.sleep(0.1)
    broken = _named(BROKEN)
    if broken is None:
        return x.clone()
    broken.unlink()
    return torch.full_like(x, float("nan"))


@through.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


through.register_autograd(_backward)
