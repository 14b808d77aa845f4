"""An optimizer over tensors of our own choice, and what it keeps of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.capture.errors import CaptureError, JobError

_STEPS = 3
_LEAST_RATE = 1e-30
"""Stands for a learning rate of 0: no parameter moves by it."""


def bound(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], params: Sequence[Tensor], lr: Tensor | float
) -> torch.optim.Optimizer:
    """The same optimizer over other tensors, before its first step, on its plain path (no foreach, no fused kernels).

    Args:
        optimizer: the job's.
        group: the options of one of its groups.
        params: any tensors.
        lr: a tensor where the update is captured.

    Raises:
        JobError: the optimizer has done steps already.
    """
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()} | {"params": list(params), "lr": lr}
    options.pop("param_names", None)
    for name in ("foreach", "fused", "differentiable"):
        if name in options:
            options[name] = False
    if "capturable" in options and isinstance(lr, Tensor) and type(optimizer).__module__.startswith("torch.optim"):
        options["capturable"] = True  # others' classes may ask for a device with it; their numbers stay tensors as they are
        # That path divides by the learning rate: at 0 (the first step of a warmup) a gradient of 0 would give NaN.
        options["lr"] = torch.where(lr == 0, _LEAST_RATE, lr)
    if not optimizer.state:
        made = object.__new__(type(optimizer))  # copy.copy leaves out what a class of its own adds to torch's attributes
        made.__dict__.update(optimizer.__dict__)
        made.param_groups = [options]
        made.state = defaultdict(dict)
        return made
    try:
        made = type(optimizer)([options], **optimizer.defaults)  # its state is made in __init__
    except TypeError as error:
        raise CaptureError(
            f"the optimizer makes state in __init__, and cannot be made again for other tensors: {error}",
            where=f"Job.optimizer: {type(optimizer).__name__}",
            expected="a constructor that takes (params, **defaults)",
            cure="Make the state in the first step.",
        ) from error
    if not made.state:
        raise JobError(
            "the optimizer has done steps already, and a package holds none of its state",
            where="Job.optimizer",
            expected="a new optimizer",
            cure="Make it in the function.",
        )
    return made


@dataclass(frozen=True, slots=True)
class StateNames:
    """What an optimizer keeps of a parameter from step to step.

    changing: names of tensors, and of numbers that change, in its state. fixed: what is there and never changes. options: names of those
    options of the group that change; since every step updates all of a group, each parameter can have them for itself. fixed_options: those
    that the first step alone changes.
    """

    changing: tuple[str, ...]
    fixed: Mapping[str, Any]
    options: tuple[str, ...]
    fixed_options: Mapping[str, Any]

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of what an update takes and gives as state."""
        return (*self.changing, *(f"group-{name}" for name in self.options))


def state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> StateNames:
    """Steps the optimizer on a parameter of a shape and looks at its state.

    Raises:
        CaptureError: it cannot update such a parameter, or what it keeps is more than tensors and numbers.
    """
    kind = f"Job.optimizer: {type(optimizer).__name__}"
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=generator).to(dtype)
    rate = float(group["lr"])
    stepped = bound(optimizer, group, [param], rate)
    before = _options(stepped)
    states: list[dict[str, Any]] = []
    options: list[dict[str, Any]] = []
    for _ in range(_STEPS):
        param.grad = torch.randn(shape, generator=generator).to(dtype)
        try:
            stepped.step()
        except Exception as error:  # an optimizer's own code may raise anything; all of it becomes one line
            raise CaptureError(
                f"the optimizer cannot update a parameter of shape {shape}: {type(error).__name__}: {error}",
                where=kind,
                expected="an update of (parameter, gradient, state)",
                cure="Give these parameters to another optimizer, such as AdamW or SGD.",
            ) from error
        states.append(dict(stepped.state[param]))
        options.append(_options(stepped))
    if stepped.param_groups[0]["lr"] != rate:
        raise CaptureError("step() changes the learning rate, which the job's schedule gives", where=kind, cure="Say it in Job.schedule.")
    if any(set(entries) != set(states[-1]) for entries in states):
        raise CaptureError(
            "the optimizer's state has other entries after the first step than later",
            where=kind,
            expected=", ".join(sorted(states[-1])),
            got=", ".join(sorted(states[0])) or "none",
            cure="Make all of the state in the first step.",
        )
    changing = {n: _changes(f"{kind}: state {n!r}", [s[n] for s in states]) for n in sorted(states[-1])}
    moved = [n for n in sorted(options[-1]) if any(not _same(before.get(n), o.get(n)) for o in options)]
    changing_options = {n: _changes(f"{kind}: option {n!r}", [o.get(n) for o in options]) for n in moved}
    return StateNames(
        changing=tuple(n for n, changes in changing.items() if changes),
        fixed={n: states[-1][n] for n, changes in changing.items() if not changes},
        options=tuple(n for n, changes in changing_options.items() if changes),
        fixed_options={n: options[-1][n] for n, changes in changing_options.items() if not changes},
    )


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (group,) = optimizer.param_groups
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k not in ("params", "lr")}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or bool(first == second)


def _changes(where: str, values: Sequence[Any]) -> bool:
    """Whether what an optimizer keeps, as it was after each step, is an input of its update. Otherwise it is a constant."""
    if all(isinstance(v, Tensor) for v in values):
        return True
    if all(v is None or isinstance(v, bool | int | float | str) for v in values):
        if all(v == values[0] for v in values):
            return False
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            return True
    raise CaptureError(
        "what the optimizer keeps is neither a tensor in its state nor a number",
        where=where,
        expected="tensors and numbers in self.state[param]",
        got=", ".join(dict.fromkeys(type(v).__name__ for v in values)),
        cure="Keep it as tensors, each under a name of its own.",
    )
