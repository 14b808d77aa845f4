"""The jobs of `large_model.py`: a Llama of 565 million parameters, and its reduced counterpart."""

from __future__ import annotations

import sys
from pathlib import Path

import trainload

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama8b import REDUCED, Shapes, plain_job

LARGE = Shapes(32_000, 1536, 4096, 16, 8, 18, 64)


def large() -> trainload.Job:
    """Return the job of the large model, in float32 with AdamW."""
    return plain_job(LARGE, rows=2, global_batch=2)


def reduced() -> trainload.Job:
    """Return the same job with the widths of a small model."""
    return plain_job(REDUCED, rows=2, global_batch=2)
