"""The demo's training job: a GPT on the bytes of Python source.

`job` runs its blocks in bfloat16 under autocast, `job_fp32` does not.
"""

from __future__ import annotations

import math

import torch
from model import GPT, Config
from torch.nn import functional

import trainload

STEPS = 600
ROWS = 16
"""Number of windows per update."""
WARM_UP = 40
PEAK_RATE = 3e-3
WEIGHT_DECAY = 0.1


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> trainload.Loss:
    """Return the mean cross-entropy of the next byte, in nats.

    `batch["tokens"]`: uint8 (rows, context + 1).
    """
    tokens = batch["tokens"].long()
    logits = model(tokens[:, :-1])
    targets = tokens[:, 1:]
    value = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == targets).float().mean()
    return trainload.Loss(value, metrics={"accuracy": accuracy})


def predict(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of every position, float32 (rows, context, vocabulary)."""
    logits: torch.Tensor = model(batch["tokens"][:, :-1].long())
    return logits


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices, but not for norms and biases."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))


def schedule(step: int) -> float:
    """Return the factor of the learning rate: linear warmup, then cosine decay from 1 to 0.02."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    progress = min(1.0, (step - WARM_UP) / (STEPS - WARM_UP))
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


def job(autocast: bool = True) -> trainload.Job:
    """Build the job, with its blocks in bfloat16."""
    torch.manual_seed(0)
    config = Config(autocast=autocast)
    example = torch.randint(0, config.vocabulary, (4, config.context + 1), dtype=torch.uint8)
    return trainload.Job(
        model=GPT(config),
        batch={"tokens": example},
        loss=loss,
        optimizer=optimizer,
        schedule=schedule,
        predict=predict,
        steps=STEPS,
        global_batch=ROWS,
        clip_norm=1.0,
    )


def job_fp32() -> trainload.Job:
    """Build the job in float32."""
    return job(autocast=False)
