"""What every rewriting of a flat graph does: look at its ends, and append nodes with the values that a fake mode finds for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def ends(module: GraphModule) -> tuple[list[Node], Sequence[Node]]:
    """The nodes of a graph's inputs and outputs."""
    nodes = list(module.graph.nodes)
    return [node for node in nodes if node.op == "placeholder"], nodes[-1].args[0]


def mode_of(placeholders: Sequence[Node]) -> Any:
    """The fake mode of a graph's values."""
    return next(value.fake_mode for node in placeholders if hasattr(value := node.meta["val"], "fake_mode"))


def append(graph: Graph, mode: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Appends a call, with its value."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node


def arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by their names in the schema, defaults among them."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    found |= dict(zip([a.name for a in schema], node.args, strict=False))
    return found | dict(node.kwargs)
