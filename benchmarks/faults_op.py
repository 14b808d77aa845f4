"""An identity operator that one process can be made to hang in, or to compute NaN with once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

STUCK = "TRAINLOAD_FAULTS_STUCK"
"""Environment variable with the path of a file.

The process whose pid is in the file hangs: a rank that is stuck outside any collective.
"""
BROKEN = "TRAINLOAD_FAULTS_BROKEN"
"""Same, but the process computes NaN and removes the file."""
SLOW = "TRAINLOAD_FAULTS_SLOW"
"""Same, but the process takes three times as long."""
SWITCHES = (STUCK, BROKEN, SLOW)
PACE = "TRAINLOAD_FAULTS_PACE"
"""Minimum duration of a call in seconds, so that steps take as long as those of a larger model.

The default is 0.05.
"""


def _named(variable: str) -> Path | None:
    """Return the file if it contains the pid of this process."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_file() and path.read_text() == str(os.getpid()) else None


@torch.library.custom_op("faults::through", mutates_args=())
def through(x: torch.Tensor) -> torch.Tensor:
    """Return a copy."""
    time.sleep(float(os.environ.get(PACE, "0.05")) * (3 if _named(SLOW) else 1))
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
