"""A job that counts its rows: each row has a weight of its own, which a step that the row is in
makes one less.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import trainload
from trainload.packaging.package import Package

BATCH = 24
"""Rows of a global batch: as many ranks as divide it can share it."""


class Counts(nn.Module):
    """Gives each row its weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(rows))

    def forward(self, row: Tensor) -> Tensor:
        """(n,) numbers of rows -> (n,) weights."""
        found: Tensor = self.left[row]
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the rows' weights: its gradient is 1 / BATCH where a row is in the batch, once
    for each time.
    """
    found: Tensor = model(batch["row"]).mean()
    return found


def freeze_counts(rows: int, steps: int, folder: Path) -> tuple[Package, Path]:
    """The job, frozen, and its data: the numbers from 0 to `rows`."""
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
    """How often each row was trained on, by the package that came of it."""
    left = trainload.open(trained).weights.tensor("left").numpy()
    found: np.ndarray = np.rint(-left).astype(np.int64)
    assert np.abs(found + left).max() < 1e-3
    return found


def demand_exact(found: np.ndarray, steps: int) -> None:
    """Check that so many steps had every row once in each whole epoch, and some of them once more
    in the last one.
    """
    whole, rest = divmod(steps * BATCH, len(found))
    assert sorted(found) == [whole] * (len(found) - rest) + [whole + 1] * rest
