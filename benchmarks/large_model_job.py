"""The jobs of `large_model.py`: a Llama of 565 million parameters, and its reduced counterpart."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import trainload

sys.path.insert(0, str(Path(__file__).resolve().parent))

from llama8b import REDUCED, Shapes, transformers_llama
from torch.nn import functional

LARGE = Shapes(32_000, 1536, 4096, 16, 8, 18, 64)


def large() -> trainload.Job:
    """Return the job of the large model, in float32 with AdamW."""
    return _job(LARGE)


def reduced() -> trainload.Job:
    """Return the same job with the widths of a small model."""
    return _job(REDUCED)


def _job(shapes: Shapes) -> trainload.Job:
    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    rows = {
        name: torch.randint(0, shapes.vocabulary, (2, shapes.length))
        for name in ("tokens", "targets")
    }
    return trainload.Job(
        model=transformers_llama(shapes),
        batch=rows,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
        global_batch=2,
    )
