"""Converts a nested example batch to leaf tensors with dotted names, and back."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainload.capture.job.names import is_part
from trainload.capture.job.tensor_classes import check_tensors, has_values
from trainload.core.errors import JobError

Constant = int | float | str | bool | enum.Enum | None
"""Non-tensor values of a batch. They are fixed at the freeze, like numbers in the source."""

LONGEST_NAME = 256
"""Maximum length of an input's name in characters, including dots."""


class Placed:
    """A tensor of an example batch whose rows are not in its leading dim.

    Not a dataclass: a dataclass in a batch is a container.

    Args:
        tensor: the tensor as the user's functions take it.
        dim: dim of its rows; None: it has none, and is the same for every batch.
    """

    __slots__ = ("dim", "tensor")

    def __init__(self, tensor: Tensor, dim: int | None) -> None:
        self.tensor = tensor
        self.dim = dim


def leaves_of(batch: Mapping[str, Any], *, values: bool = True) -> dict[str, Tensor]:
    """Return the inputs of a batch by dotted name, sorted by name: (rows, ...) tensors.

    Names are "mask.left", "pair.0", for example.

    The rows of a `Placed` tensor are moved to the front; one that is the same for every batch is
    not an input.

    Args:
        batch: input name -> tensor, constant, or a dict, list, tuple, named tuple or dataclass of
            these, to any depth.
        values: True if the tensors must have values.

    Raises:
        JobError: if a name is not usable for an input, an entry has another type, or there is no
            tensor.
        CaptureError: if a tensor has a class with behaviour of its own, is not dense, or has no
            values.
    """
    if not batch:
        raise JobError(
            "the example batch is empty",
            where="Job.batch",
            hint="Pass one real batch: a dict from input names to tensors.",
        )
    tensors: dict[str, Tensor] = {}
    for name, value in _entries("", batch):
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Placed):
            tensors |= {} if value.dim is None else {name: value.tensor.movedim(value.dim, 0)}
        elif not (value is None or isinstance(value, int | float | str | enum.Enum)):
            raise JobError(
                "the entry has a type that a batch cannot contain",
                where=f"Job.batch: {name}",
                expected=(
                    "a tensor, None, a number, a string, an Enum's member, or a dict, list, tuple,"
                    " named tuple or dataclass of these"
                ),
                got=f"{type(value).__module__}.{type(value).__qualname__}",
                hint=(
                    "Convert it to a tensor (torch.from_numpy, torch.tensor), or keep it as an"
                    " attribute of the model. See docs/guides/capture.md#unsupported-input."
                ),
            )
    if not tensors:
        raise JobError(
            "the example batch contains no tensor",
            where="Job.batch",
            hint=(
                "Convert numbers with torch.tensor(values), text to tokens, and lists of tensors to"
                " one padded tensor. See docs/guides/capture.md#unsupported-input."
            ),
        )
    check_tensors(
        ("input", name, leaf)
        for name, leaf in sorted(tensors.items())
        if values or has_values(leaf)
    )
    return dict(sorted(tensors.items()))


def constants_of(batch: Mapping[str, Any]) -> dict[str, Constant]:
    """Return the non-tensor values of a batch by dotted name, sorted."""
    return dict(
        sorted(
            (name, value)
            for name, value in _entries("", batch)
            if not isinstance(value, Tensor | Placed)
        )
    )


def with_tensors(
    batch: Mapping[str, Any], replaced: Callable[[str, Tensor], Any]
) -> dict[str, Any]:
    """Return a batch nested like `batch`, with each tensor replaced by `replaced(name, tensor)`."""

    def replace_tensor(name: str, value: Any) -> Any:
        return replaced(name, value) if isinstance(value, Tensor) else value

    return {name: _map_entries(value, str(name), replace_tensor) for name, value in batch.items()}


def structure_of(value: Any) -> str:
    """Return a description of a batch's containers without their contents.

    Batches with the same structure differ only in tensors and constants.
    """
    parts = _parts(value)
    if parts is None:
        return "tensor" if isinstance(value, Tensor | Placed) else "constant"
    inside = ", ".join(
        f"{key}: {structure_of(part)}"
        for key, part in sorted(parts.items(), key=lambda entry: str(entry[0]))
    )
    return f"{type(value).__module__}.{type(value).__qualname__}({inside})"


def rebuild(batch: Mapping[str, Any], leaves: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a batch as the user's functions take it.

    It is nested like `batch`, with its constants, and `leaves` as its tensors.

    Dataclasses are copied field by field: neither `__init__` nor `__post_init__` runs.

    Args:
        batch: the example.
        leaves: (rows, ...) tensors by dotted name; the rows of a `Placed` tensor are moved back to
            its dim.
    """

    def restore(name: str, value: Any) -> Any:
        if isinstance(value, Placed):
            return (
                value.tensor
                if value.dim is None
                else leaves[name].movedim(0, value.dim).contiguous()
            )
        return leaves[name] if isinstance(value, Tensor) else value

    return {name: _map_entries(value, str(name), restore) for name, value in batch.items()}


def _map_entries(value: Any, name: str, function: Callable[[str, Any], Any]) -> Any:
    """Return a value with each non-container entry replaced by `function(name, entry)`."""
    parts = _parts(value)
    if parts is None:
        return function(name, value)
    entries = {key: _map_entries(part, f"{name}.{key}", function) for key, part in parts.items()}
    if dataclasses.is_dataclass(value):
        twin = copy.copy(value)
        for key, part in entries.items():
            object.__setattr__(twin, key, part)
        return twin
    if isinstance(value, dict):
        return type(value)(entries)
    return (
        type(value)._make(entries.values())
        if hasattr(value, "_make")
        else type(value)(entries.values())
    )


def _entries(prefix: str, parts: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, entry) for every entry that is not a container, depth first."""
    for key, value in parts.items():
        name = f"{prefix}{key}"
        if not isinstance(key, int | str) or isinstance(key, bool) or not is_part(str(key)):
            place = f"Job.batch: {prefix.rstrip('.')}" if prefix else "Job.batch"
            expected = "an integer, or a string without dots and control characters"
            raise JobError("invalid input name", where=place, expected=expected, got=repr(key))
        if len(name) > LONGEST_NAME:
            raise JobError(
                "an input's name is too long",
                where="Job.batch",
                expected=f"at most {LONGEST_NAME} characters",
                got=f"{name[:40]}...",
            )
        inside = _parts(value)
        if inside is None:
            yield name, value
        else:
            yield from _entries(f"{name}.", inside)


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """Return a container's entries by key if it can be rebuilt from them, else None."""
    if type(value) in (dict, OrderedDict):
        if len({str(key) for key in value}) < len(value):
            raise JobError(
                "two keys of a dict have the same string form",
                where="Job.batch",
                expected="distinct names",
                got=repr(list(value)[:8]),
            )
        return dict(value)
    if type(value) in (tuple, list):
        return dict(enumerate(value))
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, torch.Size):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping | torch.nn.Module):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        beside = sorted(set(getattr(value, "__dict__", ())) - set(parts))
        if beside:
            raise JobError(
                f"a {type(value).__name__} has attributes that are not fields, which the graphs"
                " would fix to the example's values",
                where="Job.batch",
                expected=f"only the fields {', '.join(parts)}",
                got=", ".join(beside),
                hint="Make it a field, or a property.",
            )
        return parts
    return None
