"""Add calls to flat graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node


def append(graph: Graph, mode: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Append a call with its fake value, or insert it where the graph inserts nodes.

    Nodes among the arguments stand for their values. `mode` is the fake mode of the graph's values.
    """
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node
