"""Add calls to flat graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from trainload.autograd_trace.graphs import TANGENT


def append(graph: Graph, mode: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Append a call with its fake value, or insert it where the graph inserts nodes.

    Nodes among the arguments stand for their values. `mode` is the fake mode of the graph's values.
    """
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node


def remove_dead_code(graph: Graph) -> None:
    """Remove nodes that nothing reads, except the one at which backward begins.

    With a loss in chunks nothing reads that one.
    """
    graph.eliminate_dead_code(lambda node: node.name == TANGENT or node.is_impure())


def converted(call: Callable[..., Node], value: Node, dtype: torch.dtype) -> Node:
    """Return a tensor in a dtype: itself if it has that dtype.

    Args:
        call: appends a call to the graph.
        value: node of the tensor.
        dtype: the dtype.
    """
    if value.meta["val"].dtype == dtype:
        return value
    return call(torch.ops.aten._to_copy.default, value, dtype=dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's own kernels add values of a dtype: float32 at least."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
