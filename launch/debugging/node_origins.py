"""The user's module and line that a node of a graph comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import TANGENT, Port, Role
from trainload.packaging.format.source_map import modules_of, users_line


def module_of(node: Node) -> str:
    """Return the path of the user's module whose code called an operator; "" for the model itself,
    the loss, or if it is unknown.

    A node that no line of the user made, such as the sum of two gradients, has that of the nearest
    node that it is computed from.
    """
    return _nearest(node, _own_module)


def line_of(node: Node) -> str:
    """Return the line of the user's code, as "model.py:12: y = x.log()", likewise; "" if it is
    unknown.
    """
    return _nearest(node, _own_line)


def backward_begins(module: GraphModule, inputs: Sequence[Port]) -> int:
    """Return the position of the first node of a graph's backward; the number of nodes if it has no
    backward.

    Args:
        module: a graph of a rank.
        inputs: its inputs.
    """
    if any(port.role in (Role.COTANGENT, Role.SAVED) for port in inputs):
        return 0  # backward of a pipeline's stage
    nodes = list(module.graph.nodes)
    return next((at for at, node in enumerate(nodes) if node.name == TANGENT), len(nodes))


def _own_module(node: Node) -> str | None:
    if not node.meta.get("stack_trace"):
        return None
    modules = modules_of(node)
    return modules[-1] if modules else ""


def _own_line(node: Node) -> str | None:
    return users_line(str(node.meta.get("stack_trace") or "")) or None


def _nearest(node: Node, of: Callable[[Node], str | None]) -> str:
    seen, pending = {node}, [node]
    while pending:
        each = pending.pop(0)
        if (known := of(each)) is not None:
            return known
        fresh = [source for source in each.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending += fresh
    return ""
