"""Leaves of an optimizer's state of a parameter: factors in lists (SOAP), moments in dicts,
projections in objects (GaLore).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested dicts, lists, tuples and plain objects with its name: "step",
    "GG-0", "projector-basis".
    """
    if not _is_nested(value):
        yield name, value
        return
    for key, inner in _entries(value).items():
        yield from leaves(inner, f"{name}-{key}" if name else str(key))


def rebuilt(value: Any, replacements: Mapping[str, Any], name: str = "") -> Any:
    """Return a copy of the same structure, new at every level, with the leaves in `replacements`
    replaced by name and the others kept.
    """
    if not _is_nested(value):
        return replacements.get(name, value)
    entries = {
        key: rebuilt(inner, replacements, f"{name}-{key}" if name else str(key))
        for key, inner in _entries(value).items()
    }
    if isinstance(value, dict):
        return entries
    if isinstance(value, list | tuple):
        return type(value)(entries.values())
    result = copy.copy(value)
    result.__dict__.update(entries)
    return result


def copied(value: Any) -> Any:
    """Return a snapshot of a value: a clone of a tensor, or a new structure with the same
    leaves.
    """
    return value.clone() if isinstance(value, Tensor) else rebuilt(value, {})


def _is_nested(value: Any) -> bool:
    """Return True if a value has leaves: a plain container, or an instance of a Python class with
    attributes.
    """
    if type(value) in (dict, list, tuple):
        return True
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type)
        and not callable(value)
    )


def _entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else vars(value)
