"""Jobs with several optimizers, one of them user-defined, and the plain loop to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.autograd_trace.optimizers import Factors
from tests.shared import frozen_once
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import swa_utils

import trainload
from trainload.launching.data.sampler import rows
from trainload.packaging.package import Package

ROWS = 8
STEPS = 12
SEED = 3


class Model(nn.Module):
    """Model with matrices of three shapes and vectors of two; (rows, 8) -> (rows, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 12)
        self.third = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + functional.gelu(self.third(torch.tanh(self.second(self.norm(x)))))
        out: Tensor = self.last(x)
        return out


class Softened(torch.autograd.Function):
    """tanh with a gradient that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        result: Tensor = gradient * (1 - 0.5 * y * y)
        return result


class OwnBackward(Model):
    """Model with a user-defined autograd function on its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Softened.apply(self.norm.weight[:8] * x))  # type: ignore[no-untyped-call]  # torch's own


class Half(Model):
    """Model whose outputs and gradients are rounded to float16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.float16).float()


class AutocastHalf(Model):
    """Model under autocast to float16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = super().forward(x)
        return out.float()


class Damped(optim.Optimizer):
    """User-defined optimizer with a bias-corrected mean of the gradients.

    The count of steps is a Python number. The update is divided by the parameter's norm.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are not supported
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                size = group["lr"] / math.sqrt(1 - group["beta"] ** state["step"])
                p.data.add_(state["mean"], alpha=-size / max(1.0, p.norm().item()))


def factored(model: nn.Module) -> list[optim.Optimizer]:
    """Return Adafactor for matrices and `Damped` for vectors. Both update whole parameters."""
    parameters = list(model.parameters())
    return [
        optim.Adafactor([p for p in parameters if p.ndim > 1], lr=0.05, weight_decay=0.01),
        Damped([p for p in parameters if p.ndim == 1]),
    ]


def muon(model: nn.Module) -> list[optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for the other parameters."""
    hidden = [model.get_parameter(f"{name}.weight") for name in ("second", "third")]
    rest = [p for p in model.parameters() if not any(p is h for h in hidden)]
    return [optim.Muon(hidden, lr=0.02), optim.AdamW(rest, lr=0.01)]


def preconditioned(model: nn.Module) -> optim.Optimizer:
    """Return an optimizer with state in lists and branches on the step number."""
    return Factors(model.parameters(), lr=0.02)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


def data() -> dict[str, Tensor]:
    """Return a data set of 41 rows."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(41, 8, generator=generator)
    return {"x": x, "y": torch.sin(x.flip(1)) * 0.5 + 0.1 * torch.randn(41, 8, generator=generator)}


def write_data(path: Path) -> Path:
    """Write `data` as npz."""
    x, y = (data()[name].numpy() for name in ("x", "y"))
    np.savez(path, x=x, y=y)
    return path


def adam(model: nn.Module) -> optim.Optimizer:
    """Return an optimizer that can update slices of parameters."""
    return optim.AdamW(model.parameters(), lr=0.02)


def make_job(
    optimizer: Callable[[nn.Module], Any], kind: type[Model] = Model, **options: Any
) -> trainload.Job:
    """Return the job, always with the same initial weights."""
    torch.manual_seed(0)
    batch = {name: value[:4] for name, value in data().items()}
    given: dict[str, Any] = {
        "schedule": _schedule,
        "steps": STEPS,
        "global_batch": ROWS,
        "seed": SEED,
        **options,
    }
    return trainload.Job(model=kind(), batch=batch, loss=loss, optimizer=optimizer, **given)


def frozen(factory: pytest.TempPathFactory) -> Package:
    """Return the job with `adam`, frozen once per test session. Tests must not change it."""
    return frozen_once(factory, "adam", lambda: make_job(adam))


def _schedule(step: int) -> float:
    return min(1.0, (step + 1) / 4) * (0.6 + 0.4 * math.cos(step / 5))


@dataclass(frozen=True)
class Eager:
    """Results of the plain loop. `scales`: scale of the loss by step."""

    losses: list[float]
    model: nn.Module
    mean: nn.Module | None
    scales: list[float]


def eager(job: trainload.Job) -> Eager:
    """Run the plain loop, using only PyTorch."""
    assert job.optimizer is not None
    made: Any = job.optimizer(job.model)
    optimizers: list[optim.Optimizer] = made if isinstance(made, list) else [made]
    schedule: Any = job.schedule
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    whole, losses, scales = data(), list[float](), list[float]()
    mean = None
    if job.ema is not None:
        rule = swa_utils.get_ema_multi_avg_fn(job.ema.decay)  # type: ignore[no-untyped-call]  # torch's own
        mean = swa_utils.AveragedModel(job.model, multi_avg_fn=rule)
    scaler = torch.amp.GradScaler(
        "cpu",
        enabled=job.loss_scaling is not None,
        **asdict(job.loss_scaling or trainload.LossScaling()),
    )
    for step in range(job.steps):
        chosen = torch.from_numpy(rows(SEED, 41, step * ROWS, ROWS))
        value = loss(job.model, {name: tensor[chosen] for name, tensor in whole.items()})
        for group, rate in groups:
            group["lr"] = rate * schedule(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]  # torch's own
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if job.clip_value is not None:
            nn.utils.clip_grad_value_(job.model.parameters(), job.clip_value)
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
        before = scaler.get_scale()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if mean is not None and scaler.get_scale() >= before:
            mean.update_parameters(job.model)
        losses.append(value.item())
    return Eager(losses, job.model, None if mean is None else mean.module, scales)
