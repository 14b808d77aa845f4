"""Seven small jobs with different kinds of models, and their data. In float32, without autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.laws.gpt import gpt_job, token_rows
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload.capture.job.definition import Loss

STEPS, BATCH, ROWS = 50, 8, 160
WIDTH, CLASSES = 32, 10


class Attention(nn.Module):
    """(rows, positions, WIDTH) -> (rows, positions, WIDTH), with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix_in, self.mix_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix_in(x).chunk(3, -1)
        )
        found: Tensor = self.mix_out(
            functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        )
        return found


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.feed_forward = Attention(), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        found: Tensor = x + self.feed_forward(self.norms[1](x))
        return found


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class VisionTransformer(nn.Module):
    """(rows, 8, 8) images -> (rows, CLASSES): sixteen patches, blocks, dropout."""

    def __init__(self, blocks: int = 2, feed_forward: Callable[[], nn.Module] = _wide) -> None:
        super().__init__()
        self.patch, self.positions = (
            nn.Linear(4, WIDTH),
            nn.Parameter(0.02 * torch.randn(16, WIDTH)),
        )
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(feed_forward()) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.reshape(-1, 4, 2, 4, 2).transpose(2, 3).flatten(3).flatten(1, 2)
        x = self.dropout(self.patch(patches) + self.positions)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x).mean(1))
        return found


class Convolutions(nn.Module):
    """(rows, 8, 8) images -> (rows, CLASSES), with batch norms.

    There is no ReLU: after a batch norm of two rows, its kink amplifies rounding of the weights
    (1e-7) to 1e-3 of a loss within fifty steps, in a single process of plain torch too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1)
            for before, after in ((1, 16), (16, 16), (16, 32))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (16, 16, 32))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = functional.silu(norm(layer(x)))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class Experts(nn.Module):
    """Four experts, of which each position uses the best two.

    All experts are computed, and a router weights their outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(WIDTH**-0.5 * torch.randn(4, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter((2 * WIDTH) ** -0.5 * torch.randn(4, 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        best, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1))
        hidden = functional.gelu(torch.einsum("rpw,ewh->rpeh", x, self.up))
        return torch.einsum("rpeh,ehw,rpe->rpw", hidden, self.down, weights)


class Mixture(nn.Module):
    """(rows, 8, 8) images -> (rows, CLASSES), with attention and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(8, WIDTH), Block(Experts())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.block(self.enter(x))).mean(1))
        return found


class Branches(nn.Module):
    """(rows, 8, 8) images -> (rows, CLASSES), with a branch on the value of a parameter.

    The parameter changes its sign during training, and with it the branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.head = (
            nn.Linear(64, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.gate = nn.Parameter(torch.tensor([0.05]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x.flatten(1)))
        x = torch.cond(
            self.gate.sum() > 0,
            lambda v: self.middle(v).relu(),
            lambda v: self.middle(v).sin(),
            (x,),
        )
        found: Tensor = self.head(x * (1 + self.gate))
        return found


class Recurrence(nn.Module):
    """(rows, 8, 8) images -> (rows, CLASSES), with a scan over their lines."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.head = (
            nn.Linear(8, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.scan import scan

        def step(carry: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
            moved = torch.tanh(self.again(carry) + line)
            return moved, moved.clone()

        lines = self.enter(x).transpose(0, 1)
        _, states = scan(step, torch.zeros_like(lines[0]), lines)
        found: Tensor = self.head(states.mean(0))
        return found


def _classified(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    logits = model(batch["image"])
    with torch.no_grad():
        hits = (logits.argmax(-1) == batch["label"]).float().mean()
    return Loss(functional.cross_entropy(logits, batch["label"]), metrics={"accuracy": hits})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def _digits() -> dict[str, Any]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # takes seconds

    found = load_digits()
    return {
        "image": (found.images[:ROWS] / 16).astype(np.float32),
        "label": found.target[:ROWS].astype(np.int64),
    }


def _tokens() -> dict[str, Any]:
    return {"tokens": token_rows(ROWS, seed=1).numpy()}


def _on_digits(model: Callable[[], nn.Module]) -> Callable[[], trainload.Job]:
    def make() -> trainload.Job:
        torch.manual_seed(0)
        rows = {name: torch.from_numpy(column[:4]) for name, column in _digits().items()}
        return trainload.Job(
            model=model(),
            batch=rows,
            loss=_classified,
            optimizer=_optimizer,
            steps=STEPS,
            global_batch=BATCH,
            clip_norm=1.0,
            seed=3,
        )

    return make


def llama(layers: int = 2) -> trainload.Job:
    """Return a job of a small Llama from Transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=24,
        num_hidden_layers=layers,
        max_position_embeddings=32,
        attn_implementation="sdpa",
        **sizes,
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"].long()
        logits = model(input_ids=tokens[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return trainload.Job(
        model=LlamaForCausalLM(config),
        batch={"tokens": token_rows(4)},
        loss=loss,
        optimizer=_optimizer,
        steps=STEPS,
        global_batch=BATCH,
        clip_norm=1.0,
    )


@dataclass(frozen=True, slots=True)
class Model:
    """A job and its data.

    `normalised` is True if it has batch norms, whose statistics are then synchronised.
    """

    job: Callable[[], trainload.Job]
    data: Callable[[], dict[str, Any]]
    normalised: bool = False

    def freeze(self, folder: Path) -> tuple[trainload.Package, Path]:
        """Freeze the job and write its data. Return the package and the file of the data."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the models
            package = trainload.freeze(self.job(), folder / "package.tl")
        np.savez(folder / "data.npz", **self.data())
        return package, folder / "data.npz"


MODELS = {
    "GPT, tied embeddings": Model(lambda: gpt_job(steps=STEPS), _tokens),
    "vision transformer": Model(_on_digits(VisionTransformer), _digits),
    "convolutions, batch norm": Model(_on_digits(Convolutions), _digits, normalised=True),
    "mixture of experts": Model(_on_digits(Mixture), _digits),
    "Llama": Model(llama, _tokens),
    "cond": Model(_on_digits(Branches), _digits),
    "scan": Model(_on_digits(Recurrence), _digits),
}
DEEP = {
    "vision transformer, 4 blocks": Model(
        _on_digits(lambda: VisionTransformer(4, lambda: nn.Sequential(_wide(), nn.Dropout(0.1)))),
        _digits,
    ),
    "mixture of experts, 4 blocks": Model(
        _on_digits(lambda: VisionTransformer(4, Experts)), _digits
    ),
    "Llama, 4 layers": Model(lambda: llama(4), _tokens),
}
"""Models with layers that repeat."""
