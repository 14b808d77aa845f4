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
    options = {**group, "params": list(params), "lr": lr}
    options.pop("param_names", None)
    for name in ("foreach", "fused", "differentiable"):
        if name in options:
            options[name] = False
    if "capturable" in options and isinstance(lr, Tensor):
        options["capturable"] = True
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
    """What an optimizer keeps of a parameter.

    changing: names of tensors, and of numbers that change from step to step. fixed: what never changes, by name.
    """

    changing: tuple[str, ...]
    fixed: Mapping[str, Any]


def state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> StateNames:
    """Steps the optimizer on a parameter of a shape and looks at its state.

    Raises:
        CaptureError: it cannot update such a parameter, or its state holds more than tensors and numbers.
    """
    kind = f"Job.optimizer: {type(optimizer).__name__}"
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=generator).to(dtype)
    stepped = bound(optimizer, group, [param], float(group["lr"]))
    seen: list[dict[str, Any]] = []
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
        seen.append(dict(stepped.state[param]))
    changing: list[str] = []
    fixed: dict[str, Any] = {}
    for name, value in sorted(seen[-1].items()):
        values = [entries.get(name) for entries in seen]
        if all(isinstance(v, Tensor) for v in values):
            changing.append(name)
        elif all(v is None or isinstance(v, bool | int | float | str) for v in values):
            if all(v == value for v in values):
                fixed[name] = value
            elif all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                changing.append(name)
            else:
                raise _unfit(kind, name, values)
        else:
            raise _unfit(kind, name, values)
    if any(set(entries) != set(seen[-1]) for entries in seen):
        raise CaptureError(
            "the optimizer's state has other entries after the first step than later",
            where=kind,
            expected=", ".join(sorted(seen[-1])),
            got=", ".join(sorted(seen[0])) or "none",
            cure="Make all of the state in the first step.",
        )
    return StateNames(tuple(changing), fixed)


def _unfit(kind: str, name: str, values: Sequence[Any]) -> CaptureError:
    return CaptureError(
        f"the optimizer's state {name!r} is neither a tensor nor a number",
        where=kind,
        expected="tensors and numbers in self.state[param]",
        got=", ".join(dict.fromkeys(type(v).__name__ for v in values)),
        cure="Keep it as tensors, each under a name of its own.",
    )
