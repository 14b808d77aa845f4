"""An operator that changes nothing, and in one process gets stuck while a file says so: a rank that hangs outside any collective."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

STUCK = "TRAINLOAD_FAULTS_STUCK"
"""The environment variable with the file's path; the file has the pid."""


PACE = 0.05
"""Seconds that a call takes at least, so that steps are as long as those of a larger model."""


def _stay() -> None:
    time.sleep(PACE)
    path = os.environ.get(STUCK)
    while path and Path(path).exists() and Path(path).read_text() == str(os.getpid()):
        time.sleep(0.1)


@torch.library.custom_op("faults::through", mutates_args=())
def through(x: torch.Tensor) -> torch.Tensor:
    """A copy."""
    _stay()
    return x.clone()


@through.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


through.register_autograd(_backward)
