"""A job whose activations need far more memory than its parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

import trainload

ROWS, WIDTH, WIDE = 512, 64, 4096


class Wide(nn.Module):
    """Model; (rows, WIDTH) -> (rows, WIDTH), with intermediate values of one MiB per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        spread = torch.tanh(self.layer(x).unsqueeze(-1) * self.scale)
        return torch.tanh(spread * spread).mean(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters())


def wide_job() -> trainload.Job:
    """Return a job of two steps over batches of ROWS rows."""
    return trainload.Job(
        Wide(), {"x": torch.randn(4, WIDTH)}, adam, loss=loss, steps=2, global_batch=ROWS
    )
