"""What an optimizer keeps of a parameter, leaf by leaf: factors in lists (SOAP), moments in dicts, projections in objects (GaLore)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of nested dicts, lists, tuples and plain objects with its name: "step", "GG-0", "projector-basis"."""
    if not _is_nested(value):
        yield name, value
        return
    for key, inner in _entries(value).items():
        yield from leaves(inner, f"{name}-{key}" if name else str(key))


def rebuilt(value: Any, given: Mapping[str, Any], name: str = "") -> Any:
    """The same nest, new all through, with the leaves of `given` by their names and the others as they are."""
    if not _is_nested(value):
        return given.get(name, value)
    made = {key: rebuilt(inner, given, f"{name}-{key}" if name else str(key)) for key, inner in _entries(value).items()}
    if isinstance(value, dict):
        return made
    if isinstance(value, list | tuple):
        return type(value)(made.values())
    result = copy.copy(value)
    result.__dict__.update(made)
    return result


def copied(value: Any) -> Any:
    """The same value, as it is now: a tensor's copy, or the same nest, new all through, with the same leaves."""
    return value.clone() if isinstance(value, Tensor) else rebuilt(value, {})


def _is_nested(value: Any) -> bool:
    """Whether it has leaves: a plain container, or an object of a class that is written in Python and holds tensors or numbers."""
    if type(value) in (dict, list, tuple):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type) and not callable(value)


def _entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else vars(value)
