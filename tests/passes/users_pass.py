"""Passes that a user might write."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from trainload.capture.program import Program
from trainload.passes import GRAPH

aten = torch.ops.aten
SEEN: list[tuple[str, str]] = []


def look(graph: GraphModule, program: Program) -> GraphModule:
    """Record the graph's name and the innermost module of each call."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            stack = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())
            SEEN.append((graph.meta[GRAPH], str(stack[-1][0])))
            assert "val" in node.meta or node.target is aten._assert_tensor_metadata.default
    return graph


def no_dropout(graph: GraphModule, program: Program) -> GraphModule:
    for node in list(graph.graph.nodes):
        if node.target is aten.dropout.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph


def double_negation(
    graph: GraphModule, program: Program, *, times: int = 1, target: str = "aten.embedding.default"
) -> GraphModule:
    """Change nothing; the new nodes have no `val` in their metadata."""
    for node in list(graph.graph.nodes):
        if str(node.target) == target:
            users = list(node.users)
            last = node
            with graph.graph.inserting_after(node):
                for _ in range(2 * times):
                    with graph.graph.inserting_after(last):
                        last = graph.graph.call_function(aten.neg.default, (last,))
            for user in users:
                user.replace_input_with(node, last)
    return graph


def new_graph(graph: GraphModule, program: Program) -> GraphModule:
    """Return another module than the one received."""
    return GraphModule(graph, graph.graph)


def no_graph(graph: GraphModule, program: Program) -> Any:
    return None


def raises(graph: GraphModule, program: Program) -> GraphModule:
    raise ZeroDivisionError("by nothing")


def fewer_outputs(graph: GraphModule, program: Program) -> GraphModule:
    output = next(node for node in graph.graph.nodes if node.op == "output")
    output.args = (output.args[0][:1],)
    return graph


def another_input(graph: GraphModule, program: Program) -> GraphModule:
    first = next(iter(graph.graph.nodes))
    with graph.graph.inserting_before(first):
        graph.graph.placeholder("more").meta["val"] = first.meta["val"]
    return graph


def broken(graph: GraphModule, program: Program) -> GraphModule:
    """Use a value before it is computed."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    calls[0].args = (calls[-1],)
    return graph


def specialises(graph: GraphModule, program: Program) -> GraphModule:
    """Use the batch size as a number in Python."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    assert last.meta["val"].shape[0] == 4
    return graph


def wrong_arguments(graph: GraphModule, program: Program) -> GraphModule:
    node = next(node for node in graph.graph.nodes if node.target is aten.embedding.default)
    with graph.graph.inserting_after(node):
        graph.graph.call_function(aten.mm.default, (node, node))
    return graph
