"""A model of any width and depth, with or without values.

It has attention-like layers, tied weights, buffers and dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainload.capture.job.definition import Job


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.act = act
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.act(self.up(self.norm(x))))
        return x + nn.functional.dropout(hidden * self.get_buffer("scale"), 0.1, self.training)


class Stack(nn.Module):
    """Tied embeddings around `depth` blocks; every `special`-th has another activation."""

    def __init__(self, width: int, depth: int, words: int = 32, special: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        acts = [
            torch.tanh if special and n % special == special - 1 else torch.relu
            for n in range(depth)
        ]
        self.blocks = nn.ModuleList(Block(width, act) for act in acts)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.spare = nn.Parameter(torch.ones(width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def job_of(model: nn.Module, *, words: int = 32, time: int = 5, **options: Any) -> Job:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, words, (4, time), generator=generator)
    given: dict[str, Any] = {
        "batch": {"tokens": tokens},
        "loss": loss,
        "optimizer": adamw,
        "global_batch": 16,
    }
    return Job(model=model, **(given | options))


def small(depth: int = 2, **options: Any) -> Job:
    torch.manual_seed(0)
    return job_of(Stack(8, depth, **options))


def large(width: int = 64, depth: int = 3, **options: Any) -> Job:
    with torch.device("meta"):
        return job_of(Stack(width, depth, **options))
