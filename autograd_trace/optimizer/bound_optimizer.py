"""Bind an optimizer to other tensors than the model's parameters."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from trainload.autograd_trace.optimizer.state_leaves import copied, rebuilt
from trainload.core.errors import CaptureError, JobError

_LEAST_RATE = 1e-30
"""Replacement for a learning rate of 0: no parameter moves by it."""


def bound(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    lr: Tensor | float,
) -> torch.optim.Optimizer:
    """Return the same optimizer over other tensors, before its first step, on its plain path (no
    foreach or fused kernels).

    Args:
        optimizer: the job's optimizer.
        group: the options of one of its groups.
        params: the tensors.
        lr: learning rate; a tensor if the update is captured.

    Raises:
        JobError: the optimizer has taken steps already.
    """
    options = {k: copied(v) for k, v in group.items() if k != "params"}
    options |= {"params": list(params), "lr": lr}
    options.pop("param_names", None)
    for name in ("foreach", "fused", "differentiable"):
        if name in options:
            options[name] = False
    if "capturable" in options and isinstance(lr, Tensor) and is_torchs(optimizer):
        # a third-party class may demand a device with it; its numbers stay tensors anyway
        options["capturable"] = True
        # torch's capturable path divides by the learning rate: at 0 (the first step of a warmup), a
        # gradient of 0 would yield NaN.
        options["lr"] = torch.where(lr == 0, _LEAST_RATE, lr)
    if not optimizer.state:
        return _copy_without_state(optimizer, {id(optimizer.param_groups): [options]})
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        # The group has every option. A constructor may check the value of a tensor, which has none
        # while an update is traced.
        defaults = {
            n: v
            for n, v in optimizer.defaults.items()
            if n in accepted
            and (not isinstance(v, Tensor) or accepted[n].default is inspect.Parameter.empty)
        }
        recreated = type(optimizer)([options], **defaults)  # its state is made in __init__
    except TypeError as error:
        raise CaptureError(
            "the optimizer creates state in __init__ and cannot be re-created for other tensors:"
            f" {error}",
            where=f"Job.optimizer: {type(optimizer).__name__}",
            expected="a constructor that takes (params, **options)",
            hint="Create the state in the first step.",
        ) from error
    if not recreated.state:
        raise JobError(
            "the optimizer has already taken steps, and a package does not contain its state",
            where="Job.optimizer",
            expected="a new optimizer",
            hint="Create the optimizer inside the function.",
        )
    return recreated


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer's class is one of torch's own."""
    return type(optimizer).__module__.startswith("torch.optim")


def wrapped(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that this one steps in its own step, by attribute name, as in
    Lookahead.

    They must be copied together with their wrapper: left with the model's own parameters, a wrapped
    optimizer would step nothing, and a comparison of two such wrappers would not notice.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, torch.optim.Optimizer)
    }


def _copy_without_state(
    optimizer: torch.optim.Optimizer, copies: dict[int, Any]
) -> torch.optim.Optimizer:
    """Return a copy with other groups and no state.

    `copy.copy` is not used: it leaves out what a subclass adds to the attributes of torch's
    Optimizer.

    Args:
        optimizer: an optimizer without state.
        copies: id of an object that it or its wrapper holds -> the object of the copy. So groups,
            state and wrapped optimizers stay shared within the copy.
    """
    copies.setdefault(id(optimizer.state), defaultdict(dict))
    for name, inner in wrapped(optimizer).items():
        if inner.param_groups is not optimizer.param_groups or inner.state:
            raise CaptureError(
                "the optimizer wraps another one that already has its own parameter groups or"
                " state",
                where=f"Job.optimizer: {type(optimizer).__name__}.{name}",
                expected="the same groups, and no state before the first step",
                hint="Write both updates in the step() of one class.",
            )
        copies[id(inner)] = _copy_without_state(inner, copies)
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, MethodType) and value.__self__ is optimizer:
            twin.__dict__[name] = MethodType(value.__func__, twin)
            continue
        twin.__dict__[name] = copies.get(
            id(value), rebuilt(value, {}) if type(value) in (list, dict) else value
        )
    return twin


def step(optimizer: torch.optim.Optimizer, shape: tuple[int, ...]) -> None:
    """Take one step of an optimizer on parameters of a shape. Raise CaptureError if that fails."""
    try:
        optimizer.step()
    except Exception as error:
        # an optimizer's own code may raise anything; all of it becomes one line
        raise CaptureError(
            f"the optimizer cannot update a parameter of shape {shape}: {type(error).__name__}:"
            f" {error}",
            where=f"Job.optimizer: {type(optimizer).__name__}",
            expected="an update of (parameter, gradient, state)",
            hint="Use another optimizer, such as AdamW or SGD, for these parameters.",
        ) from error
