"""A job with an optional input, a flag and two shape families, and the plain loop to compare with.

Its data is a mixture.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import trainload
from trainload.launching.data.batch_order import BatchOrder

ROWS = 12
STEPS = 10
SEED = 3
CONSTANTS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"task": "parity"})
WEIGHTS = (2.0, 1.0, 1.0, 1.0)
VARIANTS = ("", "small", "hinted", "parity")
"""Variant of each part of the mixture."""


class Reader(nn.Module):
    """Classifier of digits, or of their parity.

    Large images pass through a convolution, small ones (8 x 8) through a linear layer over the
    pixels. A hint is optional for both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, stride=2)
        self.pixels = nn.Linear(64, 24)
        self.hint = nn.Linear(3, 24)
        self.pool = nn.Linear(6, 24)
        self.digit = nn.Linear(24, 10)
        self.odd = nn.Linear(24, 2)

    def forward(
        self, image: Tensor, label: Tensor, hint: Tensor | None = None, task: str = "digit"
    ) -> Tensor:
        small = image.shape[-1] == 8
        y = (
            self.pixels(image.flatten(1))
            if small
            else self.pool(self.conv(image).relu().mean((2, 3)))
        )
        if hint is not None:
            y = y + self.hint(hint)
        y = y.relu()
        return (
            functional.cross_entropy(self.digit(y), label)
            if task == "digit"
            else functional.cross_entropy(self.odd(y), label % 2)
        )


@functools.cache
def parts() -> tuple[dict[str, Tensor], ...]:
    """Return the rows of each part.

    40 large digits of 16 x 16; 30 small ones; 20 large ones of 20 x 20 with a hint; 26 large ones
    of 16 x 16.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # takes seconds

    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16
    labels = torch.from_numpy(found.target)

    def large(start: int, stop: int, side: int) -> Tensor:
        return functional.interpolate(images[start:stop], size=(side, side))

    hints = torch.stack(
        [labels[70:90] > 4, labels[70:90] % 2 == 0, labels[70:90] % 3 == 0], -1
    ).float()
    return (
        {"image": large(0, 40, 16), "label": labels[:40]},
        {"image": images[40:70], "label": labels[40:70]},
        {"image": large(70, 90, 20), "label": labels[70:90], "hint": hints},
        {"image": large(90, 116, 16), "label": labels[90:116]},
    )


def options() -> dict[str, Any]:
    return {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
        "schedule": lambda step: 1 - 0.02 * step,
        "clip_norm": 2.0,
        "steps": STEPS,
        "global_batch": ROWS,
        "seed": SEED,
    }


def model() -> Reader:
    torch.manual_seed(0)
    return Reader()


def example(part: int) -> dict[str, Any]:
    return {**{name: tensor[:4] for name, tensor in parts()[part].items()}, **CONSTANTS[part]}


def job() -> trainload.Job:
    """Return the job with explicitly declared variants."""
    first, small, hinted, parity = (example(part) for part in range(4))
    return trainload.Job(
        model=model(),
        batch={**first, "task": "digit"},
        variants={
            "small": {**small, "task": "digit"},
            "hinted": {**hinted, "task": "digit"},
            "parity": parity,
        },
        dynamic={"image": {2: Dim.AUTO, 3: Dim.AUTO}},
        **options(),
    )


def write_mixture(folder: Path) -> Path:
    """Write the parts, one of them as Parquet and the others as npz, and return their mixture."""
    names = ["large.npz", "small.parquet", "hinted.npz", "parity.npz"]
    for name, columns in zip(names, parts(), strict=True):
        if name.endswith(".npz"):
            np.savez(folder / name, **{n: t.numpy() for n, t in columns.items()})  # type: ignore[arg-type]  # the stub treats the arrays as flags
        else:
            pq.write_table(
                pa.table(
                    {n: t.tolist() if n == "label" else _lists(t) for n, t in columns.items()}
                ),
                folder / name,
            )
    entries = [
        {"data": n, "constants": c, "weight": w}
        for n, c, w in zip(names, CONSTANTS, WEIGHTS, strict=True)
    ]
    path = folder / "mixture.json"
    path.write_text(json.dumps({"parts": entries}))
    return path


def _lists(tensor: Tensor) -> Any:
    kind = pa.float32()
    for _ in tensor.shape[1:]:
        kind = pa.list_(kind)
    return pa.array(tensor.tolist(), type=kind)


@dataclass(frozen=True)
class Eager:
    """Results of the plain loop: the loss and the part of every step, and the model."""

    losses: list[float]
    parts: list[int]
    model: nn.Module


def eager(steps: int = STEPS) -> Eager:
    """Run the plain loop over the mixture's batches in this process, using only PyTorch."""
    net, whole, given = model(), parts(), options()
    optimizer = given["optimizer"](net)
    order = BatchOrder(
        SEED,
        tuple(len(columns["label"]) for columns in whole),
        tuple(int(weight) for weight in WEIGHTS),
    )
    losses, taken = [], []
    for step in range(steps):
        part, before = order.part(step)
        chosen = torch.from_numpy(order.rows(part, before, ROWS, 0, ROWS))
        batch = {name: tensor[chosen] for name, tensor in whole[part].items()}
        optimizer.zero_grad(set_to_none=True)
        loss = net(**batch, **CONSTANTS[part])
        loss.backward()
        nn.utils.clip_grad_norm_(
            [p for p in net.parameters() if p.grad is not None], given["clip_norm"]
        )
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * given["schedule"](step)
        optimizer.step()
        losses.append(loss.item())
        taken.append(part)
    return Eager(losses, taken, net)
