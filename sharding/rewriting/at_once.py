"""Pass several tensors through one operator of flat tensors, such as a collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch.fx import Node

aten = torch.ops.aten
Name = TypeVar("Name")


def at_once(
    tensors: Mapping[Name, Node],
    call: Callable[..., Node],
    operator: Callable[[Node], Node],
    finish: Callable[[Node], Node],
) -> dict[Name, Node]:
    """Append an operator on tensors, one call for those of each dtype.

    Args:
        tensors: name -> node of a tensor of any shape, with `meta["val"]`.
        call: appends a call of an ATen operator to the graph.
        operator: appends what maps a flat tensor to one of the same length.
        finish: appends what makes each result, of the tensor's shape, from a view of the whole.

    Returns:
        Name -> node of the result.
    """
    by_dtype: dict[torch.dtype, list[Name]] = {}
    for name, node in tensors.items():
        by_dtype.setdefault(node.meta["val"].dtype, []).append(name)
    results: dict[Name, Node] = {}
    for names in by_dtype.values():
        parts = [call(aten.reshape.default, tensors[name], [-1]) for name in names]
        whole = operator(call(aten.cat.default, parts))
        start = 0
        for name in names:
            value = tensors[name].meta["val"]
            part = call(aten.slice.Tensor, whole, 0, start, start + value.numel())
            results[name] = finish(call(aten.view.default, part, list(value.shape)))
            start += value.numel()
    return results
