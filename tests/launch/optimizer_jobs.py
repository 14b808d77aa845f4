"""A job of several optimizers, one of them nobody's but ours, and the plain loop that it must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import trainload
from trainload.launch.sampler import rows

ROWS = 8
STEPS = 12
SEED = 3


class Model(nn.Module):
    """Matrices of three shapes, vectors of two; (rows, 8) -> (rows, 8)."""

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


class Damped(optim.Optimizer):
    """A user's own: a mean of gradients, corrected by a count in Python, divided by the parameter's own length."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
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
    """Adafactor for matrices, `Damped` for vectors: both take whole parameters."""
    parameters = list(model.parameters())
    return [
        optim.Adafactor([p for p in parameters if p.ndim > 1], lr=0.05, weight_decay=0.01),
        Damped([p for p in parameters if p.ndim == 1]),
    ]


def muon(model: nn.Module) -> list[optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the rest."""
    hidden = [model.get_parameter(f"{name}.weight") for name in ("second", "third")]
    rest = [p for p in model.parameters() if not any(p is h for h in hidden)]
    return [optim.Muon(hidden, lr=0.02), optim.AdamW(rest, lr=0.01)]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


def data() -> dict[str, Tensor]:
    """41 rows."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(41, 8, generator=generator)
    return {"x": x, "y": torch.sin(x.flip(1)) * 0.5 + 0.1 * torch.randn(41, 8, generator=generator)}


def write_data(path: Path) -> Path:
    """`data` as npz."""
    x, y = (data()[name].numpy() for name in ("x", "y"))
    np.savez(path, x=x, y=y)
    return path


def make_job(optimizer: Callable[[nn.Module], Any], **options: Any) -> trainload.Job:
    """The job, always with the same weights."""
    torch.manual_seed(0)
    batch = {name: value[:4] for name, value in data().items()}
    given: dict[str, Any] = {"schedule": _schedule, "steps": STEPS, "global_batch": ROWS, "seed": SEED, **options}
    return trainload.Job(model=Model(), batch=batch, loss=loss, optimizer=optimizer, **given)


def _schedule(step: int) -> float:
    return min(1.0, (step + 1) / 4) * (0.6 + 0.4 * math.cos(step / 5))


def eager(
    job: trainload.Job, *, steps: int = STEPS, before_step: Callable[[Sequence[Tensor]], None] | None = None
) -> tuple[list[float], nn.Module]:
    """The plain loop: the losses, and the model, trained. `before_step` is given the parameters, with their gradients."""
    made: Any = job.optimizer(job.model)
    optimizers: list[optim.Optimizer] = made if isinstance(made, list) else [made]
    schedule: Any = job.schedule
    schedulers = [optim.lr_scheduler.LambdaLR(o, schedule) for o in optimizers]
    whole, losses = data(), []
    for step in range(steps):
        chosen = torch.from_numpy(rows(SEED, 41, step * ROWS, ROWS))
        value = loss(job.model, {name: tensor[chosen] for name, tensor in whole.items()})
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]  # torch's own
        if before_step is not None:
            before_step(list(job.model.parameters()))
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        losses.append(value.item())
    return losses, job.model
