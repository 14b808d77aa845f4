"""Job of the laws' tests: a GPT of one layer.

It has everything that a strategy, a restart or a file could get wrong: tied embeddings, dropout, a
frozen scale, two buffers, a weight that differs from row to row, two parameter groups, clipping
that takes effect, and a schedule that changes at every step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload.capture.job.definition import Loss

VOCABULARY = 24
CONTEXT = 16
WIDTH = 32
HEADS = 2
ROWS = 8
PADDING = 0


class TinyGPT(nn.Module):
    """(rows, CONTEXT) tokens -> (rows, CONTEXT, VOCABULARY) logits."""

    calls: Tensor
    mean: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.mix_in = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mix_out = nn.Linear(WIDTH, WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.head.weight, std=0.1)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mix_in(x).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.mix_out(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) * self.scale + self.positions)
        x = x + self.dropout(self.attend(self.norms[0](x)))
        x = x + self.dropout(self.narrow(functional.gelu(self.widen(self.norms[1](x)))))
        with torch.no_grad():
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        logits: Tensor = self.head(self.norms[2](x))
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Return the mean cross-entropy of the next token, without padding."""
    tokens = batch["tokens"].long()
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    kept = (targets != PADDING).float()
    with torch.no_grad():
        hits = ((logits.argmax(-1) == targets) * kept).sum() / kept.sum()
    return Loss(
        (each * kept.flatten()).sum() / kept.sum(), weight=kept.sum(), metrics={"accuracy": hits}
    )


def predict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(batch["tokens"][:, :-1].long())
    return logits


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2]},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)


def schedule(step: int) -> float:
    """Return a factor that differs at every step, so that a wrong step count is noticed."""
    return min(1.0, (step + 1) / 10) * (0.6 + 0.4 * math.cos(step / 20))


def gpt_job(dropout: float = 0.1, steps: int = 100) -> trainload.Job:
    """Return the job, always with the same weights."""
    torch.manual_seed(0)
    return trainload.Job(
        model=TinyGPT(dropout),
        batch={"tokens": token_rows(4)},
        loss=loss,
        optimizer=optimizer,
        schedule=schedule,
        predict=predict,
        steps=steps,
        global_batch=ROWS,
        clip_norm=0.5,
        seed=7,
    )


def token_rows(rows: int, seed: int = 0) -> Tensor:
    """Return tokens, uint8 (rows, CONTEXT + 1).

    The next token follows from the previous one, except for noise; each row ends with padding of
    its own length.
    """
    generator = np.random.default_rng(seed)
    first = generator.integers(1, VOCABULARY, (rows, 1))
    steps = generator.choice([1, 1, 1, 5], (rows, CONTEXT))
    tokens = 1 + (np.concatenate([first, first + np.cumsum(steps, 1)], 1) - 1) % (VOCABULARY - 1)
    lengths = generator.integers(4, CONTEXT + 2, (rows, 1))
    tokens[np.arange(CONTEXT + 1) >= lengths] = PADDING
    return torch.from_numpy(tokens.astype(np.uint8))


def write_rows(path: Path, rows: int, seed: int) -> Path:
    """Write a data set of `token_rows` to an npz file. Return its path."""
    np.savez(path, tokens=token_rows(rows, seed).numpy())
    return path
