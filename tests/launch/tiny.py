"""A job that takes moments to freeze, derive and train.

For tests that do not depend on the model: launching, fetching, watching.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload

WORDS = 12
LENGTH = 5
ROWS = 8


class Tiny(nn.Module):
    """Language model; tokens (rows, LENGTH - 1) -> logits (rows, LENGTH - 1, WORDS)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.widen = nn.Linear(8, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(functional.relu(self.widen(self.words(tokens))))
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"].long()
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tiny_job() -> trainload.Job:
    """Return the job, always with the same initial weights."""
    torch.manual_seed(0)
    return trainload.Job(
        model=Tiny(),
        batch={"tokens": torch.from_numpy(token_rows(4))},
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        steps=20,
        global_batch=ROWS,
        seed=7,
    )


def token_rows(rows: int, seed: int = 0) -> np.ndarray:
    """Return tokens, uint8 (rows, LENGTH): each one determines the next."""
    first = np.random.default_rng(seed).integers(0, WORDS, (rows, 1))
    return ((first + np.arange(LENGTH)) % WORDS).astype(np.uint8)


def write_rows(path: Path, rows: int, seed: int = 1) -> Path:
    """Write a data set of `token_rows` as npz."""
    np.savez(path, tokens=token_rows(rows, seed))
    return path
