"""Bitwise reproducible results, which torch provides only on request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainload.capture.job.ambient import deterministic_algorithms

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable without which cuBLAS may sum in another order in each call."""


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Compile graphs and run operators deterministically within the context: sums have a fixed
    order. If it is not wanted, nothing is changed.

    Otherwise scatter-adds, as in the gradient of an embedding, are atomic additions whose order
    changes from run to run, both in eager mode and in Inductor's kernels. Operators without a
    deterministic form warn, once each. cuBLAS reads its setting once, at its first call, so that
    stays for the process. For attention on GPUs see `deterministic_attention.py`.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault(_CUBLAS, ":4096:8")
    # a module that replaces itself by an object, which stubs cannot express
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    # a debugging aid that costs a pass over every new tensor
    settings.fill_uninitialized_memory = False
    try:
        with deterministic_algorithms(True):
            yield
    finally:
        settings.fill_uninitialized_memory = fill
