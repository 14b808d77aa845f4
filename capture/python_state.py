"""What a job keeps in Python between calls, where no graph sees it: numbers of modules and functions, random generators."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from trainload.capture.function import Traced
from trainload.capture.place import is_users

_LARGEST = 256
"""Containers of more entries are data, and not looked into."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class Holder(NamedTuple):
    """Where a number is kept: the module or the function, and the name of the attribute or variable."""

    where: str
    name: str


Kept = Mapping[Holder, Any]
"""A number, a text, a mapping of a container's keys to its numbers, or a text for the state of a generator."""


def numbers_of(traced: Traced) -> Kept:
    """Return what the modules of a job's model, and the functions that are traced, hold in Python."""
    found: dict[Holder, Any] = {}
    functions: dict[str, FunctionType] = {}
    for path, module in traced.model.named_modules():
        where = f"module {path}" if path else "Job.model itself"
        for name, value in vars(module).items():
            if name not in _OF_TORCH and (number := _number(value)) is not None:
                found[Holder(where, f"{path}.{name}" if path else name)] = number
            if isinstance(value, FunctionType):
                functions.setdefault(where, value)
        forward = type(module).forward
        if isinstance(forward, FunctionType) and is_users(forward.__code__.co_filename):
            functions.setdefault(f"{type(module).__name__}.forward", forward)
    for function in traced.functions():
        if isinstance(function, FunctionType):
            functions.setdefault("Job", function)
    for where, function in functions.items():
        for name, value in _variables(function):
            if (number := _number(value)) is not None:
                found[Holder(where, name)] = number
    return found


def changed(before: Kept, after: Kept) -> set[Holder]:
    """Return where the numbers of a call's beginning and end differ. Entries that a container got or lost are no change."""
    return {holder for holder, value in after.items() if _differ(before.get(holder), value)}


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return any(_differ(before[key], after[key]) for key in before.keys() & after.keys())
    return before is not after and before != after


def _number(value: Any) -> Any:
    """Return what stands for a value that a call may change; None for one of no interest."""
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, random.Random):
        return str(value.getstate())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, list | tuple | deque | dict) and len(value) <= _LARGEST:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: entry for key, entry in entries if isinstance(entry, int | float)} or None
    return None


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function finds outside of itself: of the functions around it and of its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is not assigned yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def generators() -> dict[str, object]:
    """Return the states of Python's and numpy's own random generators by the module's name."""
    numpys: Any = np.random.get_state(legacy=False)
    return {"random": random.getstate(), "numpy.random": (numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["has_gauss"])}


def drawn_from(before: Mapping[str, object]) -> list[str]:
    """Return the modules whose generators have another state than before."""
    return [name for name, state in generators().items() if state != before[name]]
