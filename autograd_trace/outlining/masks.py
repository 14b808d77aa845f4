"""Store the masks that go from one call to another as bytes that vector instructions can write.

Inductor's CPU kernels store a bool tensor element by element, 20 times slower than a uint8 tensor
of the same bits (torch 2.13), and load it three times slower. The saved mask of every dropout would
be such a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from trainload.autograd_trace.graph_calls import append

aten = torch.ops.aten
PACKED = (torch.bool, torch.int32, torch.uint8)
"""Conversions of a mask into bytes. Directly from bool they are slow too."""


def is_mask(node: Node) -> bool:
    """Return True if a node's value is a bool tensor of at least one dim."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.bool and value.ndim > 0


def pack(graph: Graph, mask: Node) -> Node:
    """Append the conversion of a bool tensor to uint8 of the same shape."""
    node, mode = mask, mask.meta["val"].fake_mode
    for dtype in PACKED[1:]:
        node = append(graph, mode, aten._to_copy.default, node, dtype=dtype)
    return node


def unpack(graph: Graph, packed: Node) -> Node:
    """Append the conversion of a packed mask to bool."""
    mode: Any = packed.meta["val"].fake_mode
    number = append(graph, mode, aten._to_copy.default, packed, dtype=torch.int32)
    return append(graph, mode, aten.ne.Scalar, number, 0)


def packed_value(value: Tensor) -> Tensor:
    """Return the fake value of a packed mask."""
    with value.fake_mode:  # type: ignore[attr-defined]  # a FakeTensor: its class has no public name
        return value.to(torch.uint8)
