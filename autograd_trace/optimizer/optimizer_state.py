"""State that an optimizer keeps of a parameter from step to step, and which of it an update reads
and writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.autograd_trace.optimizer.bound_optimizer import bound, step, wrapped
from trainload.autograd_trace.optimizer.state_leaves import copied, leaves, rebuilt
from trainload.core.errors import CaptureError

_RATES = (1.0, 0.5, 2.0)
"""Factors of the group's learning rate in the steps that detect changing state; state that follows
the learning rate changes too.
"""


@dataclass(frozen=True, slots=True)
class StateNames:
    """Names of the state that an optimizer keeps of a parameter from step to step.

    Attributes:
        changing: names of the state's leaves that are tensors, or numbers that change.
        like: that state; its other leaves never change.
        shared: names of changing values that it keeps for all parameters, among a group's options
            ("group-k") or in its state ("optimizer-k"). Since every step updates the whole group,
            each parameter can have its own copy.
        fixed: values of this kind that only the first step changes.
        numbers: names of the entries that are Python numbers.
    """

    changing: tuple[str, ...]
    like: Mapping[str, Any]
    shared: tuple[str, ...]
    fixed: Mapping[str, Any]
    numbers: frozenset[str]

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the state entries that an update reads and writes."""
        return (*self.changing, *self.shared)

    def of(self, optimizer: torch.optim.Optimizer, param: Tensor) -> list[Any]:
        """Return the values of `entries` after a step."""
        values_by_name = read_state(optimizer, param)
        return [values_by_name[name] for name in self.entries]

    def give(self, optimizer: torch.optim.Optimizer, param: Tensor, values: Sequence[Any]) -> None:
        """Set the values of `entries` in the optimizer."""
        count = len(self.changing)
        _write_state(
            optimizer,
            param,
            rebuilt(self.like, dict(zip(self.changing, values[:count], strict=True))),
        )
        for name, value in {
            **self.fixed,
            **dict(zip(self.shared, values[count:], strict=True)),
        }.items():
            owner, _, key = name.partition("-")
            store: dict[Any, Any] = (
                optimizer.param_groups[0] if owner == "group" else optimizer.state
            )
            store[key] = value


def state_names(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> StateNames:
    """Step the optimizer on a parameter of a shape and inspect its state.

    Raises:
        CaptureError: it cannot update such a parameter, or it keeps other values than tensors and
            numbers.
    """
    kind = f"Job.optimizer: {type(optimizer).__name__}"
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=generator).to(dtype)
    rate = float(group["lr"])
    stepped = bound(optimizer, group, [param], rate)
    before = _read_shared(stepped)
    states: list[dict[str, Any]] = []
    shared: list[dict[str, Any]] = []
    for factor in _RATES:
        param.grad = torch.randn(shape, generator=generator).to(dtype)
        stepped.param_groups[0]["lr"] = rate * factor
        step(stepped, shape)
        if stepped.param_groups[0]["lr"] != rate * factor:
            raise CaptureError(
                "step() changes the learning rate, which is set by the job's schedule",
                where=kind,
                hint="Specify the change in Job.schedule.",
            )
        states.append(_read_leaves(stepped, param))
        shared.append(_read_shared(stepped))
    if any(set(entries) != set(states[-1]) for entries in states):
        raise CaptureError(
            "the optimizer's state has different entries after the first step and after later ones",
            where=kind,
            expected=", ".join(sorted(states[-1])) or "none",
            got=", ".join(sorted(states[0])) or "none",
            hint="Create all of the state in the first step, and add nothing later.",
        )
    changing = {
        n: _is_changing(f"{kind}: state {n!r}", [s[n] for s in states]) for n in sorted(states[-1])
    }
    moved = [
        n
        for n in sorted(shared[-1])
        if any(not _is_equal(before.get(n), snapshot.get(n)) for snapshot in shared)
    ]
    changing_shared = {
        n: _is_changing(f"{kind}: option {n!r}", [snapshot.get(n) for snapshot in shared])
        for n in moved
    }
    return StateNames(
        changing=tuple(n for n, changes in changing.items() if changes),
        like=rebuilt(_nested_state(stepped, param), {}),
        shared=tuple(n for n, changes in changing_shared.items() if changes),
        fixed={n: shared[-1][n] for n, changes in changing_shared.items() if not changes},
        numbers=frozenset(
            n
            for snapshot in (*states, *shared)
            for n, value in snapshot.items()
            if _is_number(value)
        ),
    )


def read_state(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """Return everything that an optimizer keeps of a parameter, by the names of `StateNames`."""
    return {**_read_leaves(optimizer, param), **_read_shared(optimizer)}


def _read_leaves(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    return dict(leaves(_nested_state(optimizer, param)))


def _nested_state(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """Return the state of a parameter, with the separate states of wrapped optimizers under their
    attribute names.
    """
    inner = {
        name: _nested_state(inner_optimizer, param)
        for name, inner_optimizer in wrapped(optimizer).items()
        if inner_optimizer.state is not optimizer.state
    }
    return {**optimizer.state[param], **inner}


def _write_state(optimizer: torch.optim.Optimizer, param: Tensor, state: dict[str, Any]) -> None:
    inner = {
        name: inner_optimizer
        for name, inner_optimizer in wrapped(optimizer).items()
        if inner_optimizer.state is not optimizer.state
    }
    for name, inner_optimizer in inner.items():
        _write_state(inner_optimizer, param, state[name])
    optimizer.state[param] = {name: value for name, value in state.items() if name not in inner}


def _read_shared(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps for all parameters: the group's options, and state under
    string keys.
    """
    (group,) = optimizer.param_groups
    entries = {f"group-{k}": v for k, v in group.items() if k not in ("params", "lr")}
    state: dict[Any, Any] = optimizer.state
    entries |= {f"optimizer-{k}": v for k, v in state.items() if isinstance(k, str)}
    return {name: copied(value) for name, value in entries.items()}


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or bool(first == second)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_changing(where: str, values: Sequence[Any]) -> bool:
    """Return True if a value that an optimizer keeps is an input of its update; False if it is a
    constant.

    `values`: the value after each step.
    """
    if all(isinstance(v, Tensor) for v in values):
        return True
    if all(v is None or isinstance(v, bool | int | float | str) for v in values) and all(
        v == values[0] for v in values
    ):
        return False
    # a number in some steps, a 0-dim tensor in others
    if all(v.ndim == 0 if isinstance(v, Tensor) else _is_number(v) for v in values):
        return True
    raise CaptureError(
        "the optimizer keeps a value that is neither a tensor in its state nor a number",
        where=where,
        expected="tensors and numbers in self.state[param]",
        got=", ".join(dict.fromkeys(type(v).__name__ for v in values)),
        hint="Keep it as tensors, each under its own name.",
    )
