"""Properties of torch's operators, found through public names only."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node

_OVERLOAD: type[Any] = type(torch.ops.aten.add.Tensor)
HIGHER_ORDER_OPERATOR: type[Any] = next(
    c for c in type(torch.ops.higher_order.cond).__mro__ if c.__name__ == "HigherOrderOperator"
)


class Overload:
    """Attributes of an operator for which `is_overload` is true: a schema, and torch's tags."""

    namespace: str
    _schema: Any
    _overloadname: str
    overloadpacket: Any
    tags: list[torch.Tag]
    is_view: bool


def is_overload(target: object) -> TypeGuard[Overload]:
    """Return True if a node's target is a dispatcher operator, such as `aten.add.Tensor`."""
    return isinstance(target, _OVERLOAD)


def is_higher_order(target: object) -> bool:
    """Return True if a node's target takes graphs as arguments, as cond and scan do."""
    return isinstance(target, HIGHER_ORDER_OPERATOR)


def is_seeded(target: object) -> bool:
    """Return True if torch tags an operator as one that reads a random generator."""
    return is_overload(target) and torch.Tag.nondeterministic_seeded in target.tags


def draws_nothing(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if its arguments make a random operator draw nothing.

    Attention without dropout, for example.
    """
    names = [a.name for a in target._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in ("dropout_p", "dropout", "p"):
        if name in names:
            default = next(a.default_value for a in target._schema.arguments if a.name == name)
            probability = values.get(name, default)
            training = values.get("train", values.get("training", True))
            return probability == 0 or training is False
    return False


def written_by(node: Node) -> list[Node]:
    """Return the values that a node's operator writes to by its schema, including `out=`."""
    written: list[Node] = []
    if is_overload(node.target):
        arguments = node.target._schema.arguments
        args_by_name = (
            dict(zip((argument.name for argument in arguments), node.args, strict=False))
            | node.kwargs
        )
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                torch.fx.map_arg(args_by_name.get(argument.name), written.append)
    return written


def base_of(node: Node) -> Node:
    """Return the value that a value is a view of, through any number of views.

    It is the node itself if that is not a view.
    """
    while node.op == "call_function":
        # an operator such as split returns several views
        view: Any = node.args[0] if node.target is operator.getitem else node
        if not (is_overload(view.target) and view.target.is_view):
            break
        node = view.args[0]
    return node


def body_at(module: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph that a get_attr node of `module` refers to, or None."""
    body = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return body if isinstance(body, GraphModule) else None


def bodies_of(module: GraphModule, node: Node) -> dict[Node, GraphModule]:
    """Return the graphs that an operator of `module` takes, by the nodes that refer to them."""
    return {
        source: body
        for source in node.all_input_nodes
        if (body := body_at(module, source)) is not None
    }


def graphs_in(module: GraphModule) -> Iterator[GraphModule]:
    """Yield the graph and the bodies of its higher-order operators, at any depth."""
    return (part for part in module.modules() if isinstance(part, GraphModule))


def nodes_in(module: GraphModule) -> Iterator[Node]:
    """Yield every node, including nodes of bodies."""
    return (node for part in graphs_in(module) for node in part.graph.nodes)


def is_collective(node: Node) -> bool:
    """Return True if a node calls a functional collective, or waits for one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def is_view(node: Node) -> bool:
    """Return True if a node calls an operator that computes nothing."""
    return is_overload(node.target) and (
        node.target.is_view or node.target.overloadpacket.__name__ == "_unsafe_view"
    )


def calls_in(module: GraphModule) -> Iterator[Node]:
    """Yield every call of an operator, including calls in bodies."""
    return (node for node in nodes_in(module) if node.op == "call_function")
