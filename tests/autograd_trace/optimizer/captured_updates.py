"""Updates captured for a small model, and their comparison with the optimizer itself."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lion_pytorch import Lion
from tests.capture.jobs import Model, job
from tests.optimizers import optimizer_of
from torch import Tensor, optim

from trainload.autograd_trace.graphs import Recipe, UpdateGraph
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture

Make = Callable[[Any], optim.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "Adadelta": lambda p: optim.Adadelta(p, weight_decay=0.1, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adagrad-tensor": lambda p: optim.Adagrad(p, lr=torch.tensor(0.02)),
    "Adagrad-options": lambda p: optim.Adagrad(
        p, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, maximize=True
    ),
    "Adam": lambda p: optim.Adam(p, weight_decay=0.1),
    "Adam-fused": lambda p: optim.Adam(p, fused=True),
    "Adam-tensors": lambda p: optim.Adam(
        p, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99))
    ),
    "AdamW": lambda p: optim.AdamW(p, weight_decay=0.1),
    "AdamW-differentiable": lambda p: optim.AdamW(p, differentiable=True),
    "AMSGrad": lambda p: optim.AdamW(p, amsgrad=True, maximize=True),
    "Adamax": lambda p: optim.Adamax(p, weight_decay=0.1, maximize=True),
    "ASGD": lambda p: optim.ASGD(p, t0=2, lambd=0.1, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p),
    "NAdam-decoupled": lambda p: optim.NAdam(
        p, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "RAdam": lambda p: optim.RAdam(p),
    "RAdam-decoupled": lambda p: optim.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "RMSprop": lambda p: optim.RMSprop(p, weight_decay=0.1),
    "RMSprop-centered": lambda p: optim.RMSprop(p, momentum=0.5, centered=True, maximize=True),
    "Rprop": lambda p: optim.Rprop(p, maximize=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampened": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Lion": lambda p: Lion(p, lr=0.1, weight_decay=0.1),
    "Lion-decoupled": lambda p: Lion(p, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "a count in Python": lambda p: Counting(p),
    "a count in the options": lambda p: InOptions(p),
    "state made in the constructor": lambda p: Prepared(p, decay=0.5),
}
WHOLE: dict[str, Make] = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "Adafactor-options": lambda p: optim.Adafactor(
        p, lr=0.1, weight_decay=0.1, maximize=True, d=1.5, beta2_decay=-0.5
    ),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "Muon-options": lambda p: optim.Muon(
        p, lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3
    ),
    "a step of length one": lambda p: Normalised(p),
    "by its shape": lambda p: Shaped(p),
}


class Normalised(optim.Optimizer):
    """Steps along the direction of the gradient: every element depends on the norm of all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() * group["lr"])


class Shaped(Normalised):
    """Applies weight decay to matrices only, which it recognizes by their shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((p.grad + (0.5 * p if p.ndim > 1 else 0)) * group["lr"])


class Counting(optim.Optimizer):
    """Counts in a Python number and computes with it like third-party optimizers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"], state["flavour"] = 0, torch.zeros_like(p), "plain"
                state["step"] += 1
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                correction = math.sqrt(1 - group["beta"] ** state["step"])
                p.addcdiv_(
                    state["mean"],
                    p.grad.abs() + 1,
                    value=-max(1e-3, min(group["lr"], 1.0)) / correction,
                )


class Prepared(optim.Optimizer):
    """Creates its state in the constructor, from an option."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.full_like(p, decay)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p]["mean"].mul_(group["decay"]).add_(p.grad)
                p.sub_(mean * group["lr"])


class InOptions(Normalised):
    """Counts in the group's options, and sets a flag there in the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        for group in self.param_groups:
            group["k"], group["begun"] = group.get("k", 0) + 1, True
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / group["k"])


@functools.cache
def capture_of_the_model() -> Program:
    return capture(job(Model()))


def captured(
    program: Program, make: Make, *, quiet: bool = False, **options: Any
) -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """Capture the recipe and updates of an optimizer for the model.

    `quiet` ignores the warning that the optimizer lacks parameters.
    """
    given: Job = job(Model(), optimizer=lambda m: make(m.parameters()), **options)
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        return optimizer_of(given, program)


@functools.cache
def of_each_element(name: str) -> UpdateGraph:
    """Return the update of an optimizer of `ELEMENTWISE`, captured once for all tests."""
    (update,) = captured(capture_of_the_model(), ELEMENTWISE[name])[1]
    return update


@functools.cache
def adafactor() -> tuple[Recipe, tuple[UpdateGraph, ...]]:
    """Return the recipe and updates of Adafactor with a schedule."""
    return captured(
        capture_of_the_model(), WHOLE["Adafactor"], schedule=lambda step: 1 / (step + 1), steps=4
    )


def compare(update: UpdateGraph, make: Make, shape: tuple[int, ...], tolerance: float) -> None:
    """Check that five steps on a parameter of this shape equal those of torch's own optimizer."""
    torch.manual_seed(2)
    real = torch.randn(shape)
    flat = real.clone() if update.shape is not None else real.clone().flatten()
    optimizer = make([real])
    first, following = update.first.module(), update.following.module()
    state: list[Tensor] = []
    for step, rate in enumerate((0.1, 0.03, 0.3, 0.01, 0.2)):
        real.grad = torch.randn(shape)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        arguments = (flat, real.grad.view(flat.shape), torch.tensor(rate), tuple(state))
        flat, *state = following(*arguments) if step else first(*arguments)
    torch.testing.assert_close(flat.view(shape), real, rtol=tolerance, atol=tolerance)
