"""A job that counts rows: a step decreases the weight of each row in its batch by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import trainload
from trainload.packaging.package import Package

BATCH = 24
"""Rows of a global batch, which can be divided among any number of ranks that divides it."""


class Counts(nn.Module):
    """Model with one weight per row of the data."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(rows))

    def forward(self, row: Tensor) -> Tensor:
        """Return the weights (n,) of the rows with these numbers (n,)."""
        found: Tensor = self.left[row]
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean of the rows' weights.

    Each occurrence of a row in the batch adds 1 / BATCH to the gradient of its weight.
    """
    found: Tensor = model(batch["row"]).mean()
    return found


def freeze_counts(rows: int, steps: int, folder: Path) -> tuple[Package, Path]:
    """Freeze the job and write its data, the numbers from 0 to `rows` - 1. Return both."""
    job = trainload.Job(
        model=Counts(rows),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=float(BATCH)),
        batch={"row": torch.arange(4)},
        global_batch=BATCH,
        steps=steps,
    )
    np.savez(folder / "rows.npz", row=np.arange(rows))
    return trainload.freeze(job, folder / "counts.tl"), folder / "rows.npz"


def counts(trained: str | Path) -> np.ndarray:
    """Return how often each row was trained on, according to the trained package."""
    left = trainload.open(trained).weights.tensor("left").numpy()
    found: np.ndarray = np.rint(-left).astype(np.int64)
    assert np.abs(found + left).max() < 1e-3
    return found


def demand_exact(found: np.ndarray, steps: int) -> None:
    """Check that `steps` steps visited every row once per full epoch.

    In the last, partial epoch, some rows are visited once more.
    """
    whole, rest = divmod(steps * BATCH, len(found))
    assert sorted(found) == [whole] * (len(found) - rest) + [whole + 1] * rest
