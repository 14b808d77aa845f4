"""A compact GPT over bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model. `autocast`: run the blocks' matrix products in bfloat16."""

    vocabulary: int = 256
    context: int = 128
    layers: int = 6
    width: int = 128
    heads: int = 4
    dropout: float = 0.1
    autocast: bool = True


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) -> (batch, time, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = (
            self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        query, key, value = qkv.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """Pre-norm transformer block, (batch, time, width) -> (batch, time, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Decoder-only transformer with tied embeddings: (batch, time) bytes -> (batch, time,
    vocabulary) float32 logits.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.long()
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.config.autocast):
            for block in self.blocks:
                x = block(x)
        logits: torch.Tensor = self.head(self.norm(x.float()))
        return logits
