"""Nested dicts, lists and tuples of tensors, as functions of torch.func accept and return them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a nested structure with `function` applied to its tensors, in order."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [mapped(entry, function) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


def mapped_with(value: Any, dims: Any, function: Callable[[Tensor, int | None], Any]) -> Any:
    """Apply `function` to each tensor, like `mapped`, with the entry of `dims` for it.

    dims: one entry for all tensors below it, or a nested structure like the value's.
    """
    if isinstance(value, Tensor):
        return function(value, dims)
    if isinstance(value, dict):
        return {
            key: mapped_with(entry, dims[key] if isinstance(dims, dict) else dims, function)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        entry_dims = dims if isinstance(dims, list | tuple) else [dims] * len(value)
        entries = [
            mapped_with(entry, dim, function) for entry, dim in zip(value, entry_dims, strict=True)
        ]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value
