"""Jobs of models that map tokens to the logits of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def job_of(model: nn.Module) -> trainload.Job:
    """Return the job of a model: tokens (rows,) -> logits (rows, tokens)."""
    return trainload.Job(
        model=model,
        batch={"x": torch.tensor([0, 1, 2, 3]), "y": torch.tensor([3, 2, 1, 0])},
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        steps=4,
        global_batch=8,
    )
