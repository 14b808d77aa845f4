"""Jobs of models that map tokens to the logits of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package
from trainload.sharding.plans.strategies import Strategy


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def job_of(model: nn.Module) -> trainload.Job:
    """Return the job of a model: tokens (rows,) -> logits (rows, tokens)."""
    return trainload.Job(
        model=model,
        batch={"x": torch.tensor([0, 1, 2, 3]), "y": torch.tensor([3, 2, 1, 0])},
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        steps=4,
        global_batch=8,
    )


def write_tokens(path: Path, rows: int, tokens: int) -> Path:
    """Write rows of random tokens for these jobs."""
    draw = np.random.default_rng(0)
    np.savez(path, x=draw.integers(0, tokens, rows), y=draw.integers(0, tokens, rows))
    return path


def losses(
    package: Package, data: Path, run_dir: Path, strategy: Strategy = "zero3", **options: Any
) -> list[float]:
    """Train a package in this process, and return the losses of its steps."""
    plan = trainload.plan(package, trainload.Cluster(), strategy)
    trainload.launch(
        package, plan, data, run_dir=run_dir, backend="local", compile=False, **options
    )
    return [event.data["loss"] for event in read_events(run_dir) if event.kind == "step"]
