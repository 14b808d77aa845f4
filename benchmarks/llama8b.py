"""Shapes of Llama 3.1 8B as an abstract package, without weights or computation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a Llama; a row has `length` tokens."""

    vocabulary: int
    width: int
    hidden: int
    heads: int
    pairs: int
    layers: int
    length: int


def full(length: int) -> Shapes:
    """Return the shapes of Llama 3.1 8B."""
    return Shapes(128_256, 4096, 14_336, 32, 8, 32, length)


REDUCED = Shapes(256, 64, 128, 8, 2, 3, 32)


def transformers_llama(shapes: Shapes) -> nn.Module:
    """Build the model of transformers: tokens to logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shapes.vocabulary,
        hidden_size=shapes.width,
        intermediate_size=shapes.hidden,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.pairs,
        num_hidden_layers=shapes.layers,
        max_position_embeddings=shapes.length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


class Layer(nn.Module):
    """Grouped-query attention with rotary position embedding, and a gated MLP."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        size = shapes.width // shapes.heads
        self.size, self.groups = size, shapes.heads // shapes.pairs
        self.query, self.out = (nn.Linear(shapes.width, shapes.width, bias=False) for _ in range(2))
        self.key, self.value = (
            nn.Linear(shapes.width, shapes.pairs * size, bias=False) for _ in range(2)
        )
        self.gate, self.up = (nn.Linear(shapes.width, shapes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shapes.hidden, shapes.width, bias=False)
        self.before, self.between = (nn.RMSNorm(shapes.width, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        y = self.before(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = turned(query, turn), turned(key, turn)
        key, value = (
            each[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2)
            for each in (key, value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        found: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return found


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of features by angles."""
    first, second = x.float().chunk(2, -1)
    return torch.cat(
        [first * turn.cos() - second * turn.sin(), second * turn.cos() + first * turn.sin()], -1
    ).type_as(x)


class Plain(nn.Module):
    """The same model in plain torch with `is_causal` attention: tokens to logits."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.size = shapes.width // shapes.heads
        self.table, self.head = (
            nn.Embedding(shapes.vocabulary, shapes.width),
            nn.Linear(shapes.width, shapes.vocabulary, bias=False),
        )
        self.layers, self.norm = (
            nn.ModuleList(Layer(shapes) for _ in range(shapes.layers)),
            nn.RMSNorm(shapes.width, eps=1e-5),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        half = self.size // 2
        speeds = 500_000.0 ** (-torch.arange(half, device=tokens.device) / half)
        turn = torch.outer(torch.arange(tokens.shape[1], device=tokens.device).float(), speeds)
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        found: Tensor = self.head(self.norm(x))
        return found


def plain_job(shapes: Shapes, *, rows: int, global_batch: int) -> trainload.Job:
    """Return a job of the model of transformers in float32 with AdamW."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["tokens"]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    names = ("tokens", "targets")
    batch = {name: torch.randint(0, shapes.vocabulary, (rows, shapes.length)) for name in names}
    return trainload.Job(
        model=transformers_llama(shapes),
        batch=batch,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
        global_batch=global_batch,
    )


def freeze(
    path: Path,
    *,
    length: int,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    model: Callable[[Shapes], nn.Module] = transformers_llama,
) -> trainload.Package:
    """Freeze the shapes.

    Args:
        path: path of the package.
        length: number of tokens per row.
        dtype: dtype of the parameters.
        autocast: whether forward computes in bfloat16 with float32 parameters.
        model: builds the model.
    """
    with torch.device("meta"):
        large = model(full(length)).to(dtype)
    return trainload.freeze(
        _job(large, full(length), autocast),
        path,
        abstract=True,
        reduced=_job(model(REDUCED).to(dtype), REDUCED, autocast),
    )


def freeze_four_layers(path: Path) -> trainload.Package:
    """Freeze the shapes of a Llama of four layers of these widths, computing in bfloat16."""
    shapes = replace(full(2048), layers=4)
    with torch.device("meta"):
        large = Plain(shapes)
    return trainload.freeze(
        _job(large, shapes, autocast=True),
        path,
        abstract=True,
        reduced=_job(Plain(REDUCED), REDUCED, autocast=True),
    )


def _job(model: nn.Module, shapes: Shapes, autocast: bool) -> trainload.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            found = model(batch["tokens"])
        logits = found if isinstance(found, Tensor) else found.logits
        return functional.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

    rows: dict[str, Any] = {
        name: torch.randint(0, shapes.vocabulary, (2, shapes.length))
        for name in ("tokens", "targets")
    }
    return trainload.Job(
        model=model,
        batch=rows,
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4),
        steps=1000,
        global_batch=16,
    )
