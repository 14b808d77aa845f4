"""A minimal job whose plans have every axis.

Tests of what plans, candidates and commands report do not need a GPT.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload

TIME = 8
WIDTH = 16
ROWS = 8


class Model(nn.Module):
    """Two equal blocks, one for each of two stages, with features and positions to divide.

    One parameter is used by both stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(TIME, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(WIDTH // 2, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            gate, value = up(norm(x)).chunk(2, -1)
            x = x + down(functional.gelu(gate) * value)
        return x + self.positions


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


def small_job() -> trainload.Job:
    torch.manual_seed(0)
    return trainload.Job(
        model=Model(),
        batch={"x": torch.randn(4, TIME, WIDTH), "y": torch.randn(4, TIME, WIDTH)},
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        steps=10,
        global_batch=ROWS,
    )
