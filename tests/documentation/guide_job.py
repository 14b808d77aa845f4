"""Job of the prepared folder in which the commands of the guides run, there `job.py`.

Names of modules are those that the pages mention.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import trainload


class Attention(nn.Module):
    """Gated linear layers with the names of attention; x (rows, length, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.v_proj(x) * self.q_proj(x).softmax(-1)
        return y


class Layer(nn.Module):
    """Attention and a linear layer; x (rows, length, width) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.mlp(x).relu()
        return y


class Gpt(nn.Module):
    """Language model; tokens (rows, length) -> logits (rows, length, 12)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(12, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Llama(nn.Module):
    """A `Gpt` as the module `model`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.model = Gpt(width, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"].long()
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def logits(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"logits": model(batch["tokens"].long())}


def token_rows(rows: int) -> np.ndarray:
    """Return tokens, uint8 (rows, 5): each one determines the next."""
    first = np.random.default_rng(0).integers(0, 12, (rows, 1))
    return ((first + np.arange(5)) % 12).astype(np.uint8)


def job_of(model: nn.Module, global_batch: int) -> trainload.Job:
    return trainload.Job(
        model,
        {"tokens": torch.from_numpy(token_rows(4))},
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=next_token,
        predict=logits,
        dynamic={"tokens": {1: Dim("length", min=3, max=64)}},
        steps=4,
        global_batch=global_batch,
    )


def job() -> trainload.Job:
    torch.manual_seed(0)
    return job_of(Gpt(8, 4), 64)


def llama_70b() -> trainload.Job:
    return job_of(Llama(32, 4), 1024)


def llama_small() -> trainload.Job:
    return job_of(Llama(16, 3), 1024)
