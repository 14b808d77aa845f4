"""Gives control-flow operators operands that share no memory, as torch demands: parameters of one bucket are views of it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.capture.operators import bodies_of, graphs_in, is_overload


def keep_operands_apart(module: GraphModule) -> None:
    """Copy each operand of an operator with bodies that lies in the memory of one before it. In place; no value changes.

    Args:
        module: a flat graph. Every node has `meta["val"]`.
    """
    for part in graphs_in(module):
        for node in [n for n in part.graph.nodes if n.op == "call_function" and bodies_of(part, n)]:
            known: set[Node] = set()

            def apart(source: Node, node: Node = node, part: GraphModule = part, known: set[Node] = known) -> Node:
                base = _base(source)
                if not isinstance(source.meta.get("val"), Tensor) or base not in known:
                    known.add(base)
                    return source
                with part.graph.inserting_before(node):
                    copy = part.graph.call_function(torch.ops.aten.clone.default, (source,))
                copy.meta["val"] = source.meta["val"].clone()
                return copy

            node.args = torch.fx.map_arg(node.args, apart)
        part.recompile()


def _base(node: Node) -> Node:
    """The value in whose memory a value lies."""
    while node.op == "call_function":
        maker: Any = node.args[0] if node.target is operator.getitem else node
        if not (is_overload(maker.target) and maker.target.is_view):
            break
        node = maker.args[0]
    return node
