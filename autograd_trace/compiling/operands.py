"""Copy operands of control-flow operators that share memory, which torch does not compile.

Parameters of one bucket share memory: they are views of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.capture.operators import base_of, bodies_of, graphs_in


def keep_operands_apart(module: GraphModule) -> None:
    """Copy an operand of an operator with bodies if it is a view of the same tensor as an earlier
    operand. In place; no value changes.

    Args:
        module: a flat graph. Every node has `meta["val"]`.
    """
    for part in graphs_in(module):
        for node in [n for n in part.graph.nodes if n.op == "call_function" and bodies_of(part, n)]:
            bases: set[Node] = set()

            def apart(
                source: Node, node: Node = node, part: GraphModule = part, bases: set[Node] = bases
            ) -> Node:
                base = base_of(source)
                if not isinstance(source.meta.get("val"), Tensor) or base not in bases:
                    bases.add(base)
                    return source
                with part.graph.inserting_before(node):
                    copy = part.graph.call_function(torch.ops.aten.clone.default, (source,))
                copy.meta["val"] = source.meta["val"].clone()
                return copy

            node.args = torch.fx.map_arg(node.args, apart)
        part.recompile()
