"""The jobs of `large_shapes.py`: Llama 3.1 of 8, 70 and 405 billion parameters."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import trainload

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama8b import REDUCED, Shapes, full, plain_job

_job = partial(plain_job, rows=4, global_batch=512)


def llama_8b() -> trainload.Job:
    """Return the job of 8 billion parameters."""
    return _job(full(128))


def llama_70b() -> trainload.Job:
    """Return the job of 70 billion parameters."""
    return _job(Shapes(128_256, 8192, 28_672, 64, 8, 80, 128))


def llama_405b() -> trainload.Job:
    """Return the job of 405 billion parameters."""
    return _job(Shapes(128_256, 16_384, 53_248, 128, 8, 126, 128))


def reduced() -> trainload.Job:
    """Return the same job with the widths of a small model and three layers."""
    return _job(REDUCED)
