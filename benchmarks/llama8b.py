"""The shapes of Llama 3.1 8B as an abstract package: no weights, and nothing of it is computed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import trainload

VOCABULARY = 128_256
SHAPES = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131_072,
}
REDUCED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}


def freeze(path: Path, *, length: int, dtype: torch.dtype = torch.float32, autocast: bool = False) -> trainload.Package:
    """Freezes the shapes.

    Args:
        path: of the package.
        length: tokens of a row.
        dtype: of the parameters.
        autocast: whether forward computes in bfloat16 on parameters of float32.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(VOCABULARY, SHAPES)).to(dtype)
    return trainload.freeze(
        _job(model, VOCABULARY, length, autocast),
        path,
        abstract=True,
        reduced=_job(LlamaForCausalLM(_config(256, REDUCED)).to(dtype), 256, 32, autocast),
    )


def _config(vocabulary: int, shapes: dict[str, int]) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocabulary, use_cache=False, tie_word_embeddings=False, attn_implementation="sdpa", **shapes)


def _job(model: nn.Module, vocabulary: int, length: int, autocast: bool) -> trainload.Job:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            logits = model(input_ids=batch["tokens"]).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())

    rows: dict[str, Any] = {name: torch.randint(0, vocabulary, (2, length)) for name in ("tokens", "targets")}
    return trainload.Job(
        model=model, batch=rows, loss=loss, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=3e-4), steps=1000, global_batch=16
    )
