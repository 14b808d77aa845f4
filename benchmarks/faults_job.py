"""Job of the fault runs: a small fp32 network with dropout and an operator that can hang."""

from __future__ import annotations

import torch
from faults_op import through
from torch import Tensor, nn

import trainload

FEATURES, CLASSES = 32, 8


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 256), nn.Linear(256, CLASSES)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        found: Tensor = self.second(through(self.drop(torch.relu(self.first(x)))))
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def job() -> trainload.Job:
    """Build the job, always with the same weights."""
    torch.manual_seed(0)
    return trainload.Job(
        model=Net(),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch={"x": torch.randn(4, FEATURES), "y": torch.randint(0, CLASSES, (4,))},
        global_batch=8,
        steps=100,
    )
