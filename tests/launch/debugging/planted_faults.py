"""Models that make a value that is not finite where their batch says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload

ROWS = 8
WIDTH = 4
LAYERS = 5


class Divides(nn.Module):
    """Linear layer whose result is divided by zero in chosen rows; x (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, broken: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        divided: Tensor = y / torch.where(broken, 0.0, 1.0)[:, None]
        return divided


class Chain(nn.Module):
    """LAYERS layers, of which one divides by zero in the rows whose `layer` is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Divides() for _ in range(LAYERS))

    def forward(self, x: Tensor, layer: Tensor) -> Tensor:
        for number, part in enumerate(self.layers):
            x = x + part(x, layer == number)
        return x


def chain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"], batch["layer"]).square().mean()
    return loss


class Attention(nn.Module):
    """Attention over the positions that a mask allows; x (rows, positions, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill(~allowed[:, None, :], float("-inf"))
        mixed: Tensor = torch.softmax(scores, -1) @ x
        return mixed


def attention_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"], batch["allowed"]).square().mean()
    return loss


def root_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean norm of the outputs, whose gradient is not defined at a row of zeros."""
    y: Tensor = model(batch["x"])
    return (y * y).sum(1).sqrt().mean()


def rolled_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the squared error of a model that should roll the columns."""
    error: Tensor = (model(batch["x"]) - batch["x"].roll(1, 1)).square().mean()
    return error


def products_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss over products of columns, in which no dim is left for the rows."""
    y: Tensor = model(batch["x"])
    return (y.t() @ y).diagonal().log().mean()


def freeze(
    folder: Path, model: nn.Module, loss: Any, batch: dict[str, Tensor], **options: Any
) -> trainload.Package:
    given: dict[str, Any] = {
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        "global_batch": ROWS,
        "steps": 4,
        "seed": 3,
        **options,
    }
    return trainload.freeze(
        trainload.Job(model=model, batch=batch, loss=loss, **given), folder / "job.tl"
    )


def plain_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH)}


def save(path: Path, **columns: Any) -> Path:
    np.savez(path, **{name: np.asarray(value) for name, value in columns.items()})  # type: ignore[arg-type]  # numpy's stub has allow_pickle among them
    return path


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def several() -> nn.Module:
    """Return a model of several layers, which a pipeline can divide."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def masked() -> dict[str, Tensor]:
    allowed = torch.ones(ROWS, 3, dtype=torch.bool)
    allowed[:, 2] = False
    return {"x": torch.randn(ROWS, 3, WIDTH), "allowed": allowed}


def embedding_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(batch["word"])
    return functional.cross_entropy(logits, batch["next"])
