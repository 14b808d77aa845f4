"""Small models for the tests of capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainload.capture.job.definition import Job

Batch = dict[str, Tensor]


class Model(nn.Module):
    """Two linear layers, `first` and `last`, and a function of (model, hidden) between them."""

    def __init__(
        self,
        middle: Callable[[Any, Tensor], Tensor] = lambda _, x: x.relu(),
        **parts: Tensor | nn.Module,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.middle = middle
        for name, part in parts.items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.last(self.middle(self, self.first(x)))
        return last


class Function(nn.Module):
    """A module that consists of a function."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def job(model: nn.Module, **options: Any) -> Job:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "batch": {"x": torch.randn(4, 8)},
        "loss": mean_square,
        "optimizer": sgd,
    }
    return Job(model=model, **(given | options))
