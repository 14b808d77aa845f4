"""Dissolve the regions that torch.export makes for grad mode and autocast."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from trainload.capture.watching import marks

_HOP = torch.ops.higher_order
_SWITCHES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled"})
_DISSOLVED = (_HOP.wrap_with_set_grad_enabled, _HOP.wrap_with_autocast)


def has_marks(module: GraphModule) -> bool:
    """Return True if there are marks in a graph or in torch's regions inside it."""
    bodies = (_body_of(module, node)[0] for node in module.graph.nodes if node.target in _DISSOLVED)
    return any(_is_mark(node) for node in module.graph.nodes) or any(
        has_marks(body) for body in bodies
    )


def _body_of(module: GraphModule, call: Node) -> tuple[GraphModule, int]:
    """Return the body of a call of one of torch's regions, and its index among the arguments."""
    place, attribute = next(
        (i, a) for i, a in enumerate(call.args) if isinstance(a, Node) and a.op == "get_attr"
    )
    body = module.get_submodule(str(attribute.target))
    assert isinstance(body, GraphModule)
    return body, place


def _is_mark(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == marks.NAMESPACE


def dissolve(module: GraphModule) -> None:
    """Inline the bodies of torch's regions where they are called.

    The graph is rebuilt: torch changed the targets of nodes of the old graph without updating its
    tables, so that they cannot be erased from it.
    """
    graph = Graph()
    mapping: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = graph.node_copy(node)
    graph.output(_inlined(module, mapping, graph, module))
    module.graph = graph


def _inlined(
    source: GraphModule, mapping: dict[Node, Any], graph: Graph, owner: GraphModule
) -> Any:
    """Copy a graph's nodes into the graph of `owner` and return its results.

    mapping: old node -> new node; contains the placeholders at first.
    """
    results: Any = None
    for node in source.graph.nodes:
        if node.op == "placeholder" or (
            node.op == "get_attr"
            and node.users
            and all(user.target in _DISSOLVED for user in node.users)
        ):
            continue
        if node.op == "output":
            results = torch.fx.map_arg(node.args[0], mapping.__getitem__)
        elif node.target in _DISSOLVED:
            body, place = _body_of(source, node)
            entries = [n for n in body.graph.nodes if n.op == "placeholder"]
            operands = torch.fx.map_arg(node.args[place + 1 :], mapping.__getitem__)
            mapping[node] = _inlined(body, dict(zip(entries, operands, strict=True)), graph, owner)
        elif node.target is operator.getitem and node.args[0].target in _DISSOLVED:
            mapping[node] = mapping[node.args[0]][node.args[1]]
        else:
            mapping[node] = copied(node, graph, mapping.__getitem__, source, owner)
    return results


def copied(
    node: Node,
    graph: Graph,
    mapped: Callable[[Node], Node],
    source: GraphModule,
    target: GraphModule,
) -> Node:
    """Copy a node into another graph, together with the attribute that it names."""
    copy = graph.node_copy(node, mapped)
    if node.op == "get_attr":
        value = getattr(source, str(node.target))
        name = str(node.target)
        while hasattr(target, name) and getattr(target, name) is not value:
            name += "_"
        setattr(target, name, value)
        copy.target = name
    return copy


def place_bodies(graph: Graph) -> None:
    """Move control-flow bodies directly before the operators that take them.

    torch leaves them in an autocast region that came before.
    """
    for node in graph.find_nodes(op="get_attr"):
        users = list(node.users)
        for user in users[:1]:
            user.prepend(node)
        for user in users[1:]:
            with graph.inserting_before(user):
                own = graph.get_attr(str(node.target))
            own.meta = dict(node.meta)
            user.replace_input_with(node, own)


def forget_switches(graph: Graph) -> None:
    """Remove torch's own mode changes.

    torch leaves them in the graph where it makes no region of them, for example where the bodies of
    cond come first.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _SWITCHES:
            graph.erase_node(node)
