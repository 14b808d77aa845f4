"""Detects Python state that a model changes between calls: numbers and generator states.

A graph would freeze such state to its value during capture.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from trainload.capture.job.flat_function import Traced
from trainload.capture.source.patched import may_hold_models
from trainload.capture.source.source_place import is_users

_MAX_ENTRIES = 256
"""Containers with more entries are treated as data and not searched."""
_MAX_OBJECTS = 20_000
_MAX_DEPTH = 8
"""Limits of the search: the number of objects, and the depth of nesting."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}


class Holder(NamedTuple):
    """Location of a number: the module or function that leads to it, and its name there."""

    where: str
    name: str


@dataclass(slots=True)
class StateSnapshot:
    """Snapshot of the Python state of a job.

    Attributes:
        values: holder -> number, string, or state of a generator.
        attributes: holders that are attributes of a module. A new one counts as a change; a new
            entry of a container does not.
    """

    values: dict[Holder, object] = field(default_factory=dict)
    attributes: set[Holder] = field(default_factory=set)

    def changed_in(self, after: StateSnapshot) -> Set[Holder]:
        """Return the holders whose values differ in a later snapshot."""
        both = self.values.keys() & after.values.keys()
        return {
            holder for holder in both if _is_changed(self.values[holder], after.values[holder])
        } | (after.attributes - self.values.keys())


def _is_changed(first: object, second: object) -> bool:
    return first is not second and first != second


def take_snapshot(traced: Traced) -> StateSnapshot:
    """Take a snapshot of the Python state that is reachable from a job's modules and functions."""
    walk = _StateSearch()
    for path, module in traced.model.named_modules():
        where = f"module {path}" if path else "Job.model itself"
        for name, value in vars(module).items():
            if name not in _MODULE_ATTRIBUTES and not isinstance(value, nn.Module):
                holder = Holder(where, f"{path}.{name}" if path else name)
                walk.visit(holder, value)
                if holder in walk.snapshot.values:
                    walk.snapshot.attributes.add(holder)
        walk.visit(Holder(where, type(module).__name__), type(module))
    for function in traced.functions():
        walk.visit(Holder("Job", getattr(function, "__name__", "function")), function)
    return walk.snapshot


class _StateSearch:
    """Depth-first search for numbers; visits each object once."""

    def __init__(self) -> None:
        self.snapshot = StateSnapshot()
        self._seen: set[int] = set()

    def visit(self, holder: Holder, value: Any, depth: int = 0) -> None:
        """Record a number, or search an object that may contain some."""
        state = _state(value)
        if state is not None:
            self.snapshot.values[holder] = state
        elif (
            depth < _MAX_DEPTH
            and len(self._seen) < _MAX_OBJECTS
            and id(value) not in self._seen
            and not isinstance(value, Tensor | ModuleType)
        ):
            self._seen.add(id(value))
            for name, part in _parts(holder.name, value):
                self.visit(Holder(holder.where, name), part, depth + 1)


def _state(value: Any) -> object:
    """Return a number, a string or the state of a generator; None for any other value."""
    match value:
        case int() | float() | complex() | str():
            return value
        case random.Random():
            return value.getstate()
        case np.random.Generator():
            return str(value.bit_generator.state)
        case np.random.RandomState():
            return _numpy_state(value)
        case itertools.count():
            return repr(value)
    return None


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for everything that an object contains or refers to."""
    if isinstance(value, list | tuple | deque | dict):
        if len(value) <= _MAX_ENTRIES:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{key!r}]", entry) for key, entry in list(entries))
    elif isinstance(value, FunctionType):
        if is_users(value.__code__.co_filename):
            yield from _variables(value)
    elif isinstance(value, MethodType):
        yield from ((name, value.__func__), (name, value.__self__))
    elif isinstance(value, functools.partial):
        yield from (
            (name, value.func),
            (f"{name}.args", value.args),
            (f"{name}.keywords", value.keywords),
        )
    elif isinstance(value, GeneratorType):
        yield from (
            (f"{name}.{own}", entry)
            for own, entry in (value.gi_frame.f_locals if value.gi_frame else {}).items()
        )
    elif isinstance(value, property):
        yield name, value.fget
    elif isinstance(value, type):
        if may_hold_models(value.__module__):
            yield from (
                (f"{name}.{own}", entry)
                for own, entry in list(vars(value).items())
                if not own.startswith("__")
            )
    elif may_hold_models(type(value).__module__) and not isinstance(value, nn.Module):
        yield name, type(value)
        yield from (
            (f"{name}.{own}", entry) for own, entry in list(getattr(value, "__dict__", {}).items())
        )


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for a function's closure variables, globals, defaults and attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is not assigned yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield f"{function.__name__}.__defaults__", function.__defaults__
    yield f"{function.__name__}.__kwdefaults__", function.__kwdefaults__
    yield from (
        (f"{function.__name__}.{name}", value) for name, value in list(vars(function).items())
    )


def generators() -> dict[str, object]:
    """Return the states of Python's and numpy's global random generators by module name."""
    return {"random": random.getstate(), "numpy.random": _numpy_state(np.random)}


def _numpy_state(generator: Any) -> object:
    state = generator.get_state(legacy=False)
    inner = {
        name: part.tobytes() if isinstance(part, np.ndarray) else part
        for name, part in state["state"].items()
    }
    return {**state, "state": inner}


def drawn_from(before: Mapping[str, object]) -> list[str]:
    """Return the names of the modules whose global generators have changed since `before`."""
    return [name for name, state in generators().items() if state != before[name]]
