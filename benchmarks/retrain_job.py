"""Job and data of the retraining benchmarks: scikit-learn's digits, with drift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import trainload

WIDTH = 32
FILE_ROWS = 240


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> trainload.Loss:
    """Return the cross-entropy of the digit."""
    logits = model(batch["pixels"])
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == batch["digit"]).float().mean()
    return trainload.Loss(
        functional.cross_entropy(logits, batch["digit"]), metrics={"accuracy": accuracy}
    )


def make_job(width: int = WIDTH, layers: int = 1, frozen: bool = False) -> trainload.Job:
    """Build a job with a multilayer perceptron. `frozen`: train only the last layer."""
    torch.manual_seed(0)
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), *inner, nn.Linear(width, 10))
    if frozen:
        for parameter in list(model.parameters())[:-2]:
            parameter.requires_grad_(False)
    return trainload.Job(
        model=model,
        batch={"pixels": torch.randn(4, 64), "digit": torch.tensor([0, 1, 2, 3])},
        loss=loss,
        predict=lambda m, b: m(b["pixels"]),
        optimizer=lambda m: torch.optim.AdamW(
            [p for p in m.parameters() if p.requires_grad], lr=3e-3
        ),
        steps=30,
        global_batch=16,
    )


def job() -> trainload.Job:
    """Build the job of the year."""
    return make_job()


def digits(day: int, draw: np.random.Generator, rows: int = FILE_ROWS) -> dict[str, np.ndarray]:
    """Return the rows of a day.

    Over time, the digits become brighter and noisier and shift slowly to one side.
    """
    data = load_digits()
    chosen = draw.integers(0, len(data.target), rows)
    images = data.images[chosen].astype(np.float32) / 16
    shift = day // 25
    images = np.roll(images, shift, axis=2) * (1 + day / 100) + draw.normal(
        0, 0.05 + day / 1000, images.shape
    )
    return {
        "pixels": images.reshape(rows, 64).astype(np.float32),
        "digit": data.target[chosen].astype(np.int64),
    }


def write_day(folder: Path, day: int, kind: str, draw: np.random.Generator) -> None:
    """Write the file of a day.

    Kinds: "good"; "nan": with a NaN; "missing": without the column of digits; "worse": with random
    labels.
    """
    rows = digits(day, draw)
    if kind == "nan":
        rows["pixels"][17, 3] = np.nan
    if kind == "missing":
        del rows["digit"]
    if kind == "worse":
        rows["digit"] = draw.integers(0, 10, len(rows["digit"]))
    folder.mkdir(exist_ok=True)
    trainload.write_rows([rows], folder / f"day-{day:03}.arrow")
