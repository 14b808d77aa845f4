"""Helpers for rewriting flat graphs: their inputs and results, and the sources of a value."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.operators import bodies_of


class LazyGraphModule(GraphModule):
    """A graph module that generates its Python code on the first call. Most graphs of a plan are
    only rewritten, never called.
    """

    def recompile(self) -> None:  # type: ignore[override]  # there is no code to return
        type(self).forward = LazyGraphModule.forward  # type: ignore[method-assign]  # each module has a class of its own

    def forward(self, *arguments: Any) -> Any:
        super().recompile()
        return self(*arguments)


def copy_of(step: StepGraph) -> StepGraph:
    """Return a copy of a step graph, whose nodes can be changed."""
    module = LazyGraphModule(step.module, deepcopy(step.module.graph))
    return StepGraph(module, step.inputs, step.outputs)


def ends(module: GraphModule) -> tuple[list[Node], Sequence[Node]]:
    """Return the nodes of a graph's inputs and outputs."""
    nodes = list(module.graph.nodes)
    return [node for node in nodes if node.op == "placeholder"], nodes[-1].args[0]


def mode_of(placeholders: Sequence[Node]) -> Any:
    """Return the fake mode of a graph's values."""
    return next(
        value.fake_mode for node in placeholders if hasattr(value := node.meta["val"], "fake_mode")
    )


def holds_tensors(node: Node) -> bool:
    """Return True if a node's value is a tensor or several, not a size."""
    return isinstance(node.meta.get("val"), Tensor | tuple | list)


def computed_from(
    nodes: Iterable[Node], *, values: bool = False, owner: GraphModule | None = None
) -> set[Node]:
    """Return the nodes that some nodes are computed from, including themselves.

    Args:
        nodes: nodes of one graph.
        values: True to ignore sizes: a tensor with the size of an input need not depend on its
            values.
        owner: the module that holds the branches of the graph's `cond` operators. With it, a result
            of a `cond` depends on the predicate and on the operands that this result is computed
            from; without it, on all operands.
    """
    reached = set(nodes)
    stack = list(reached)
    while stack:
        fresh = {
            source for source in _sources(stack.pop(), owner) if holds_tensors(source) or not values
        } - reached
        reached |= fresh
        stack += fresh
    return reached


def _sources(node: Node, owner: GraphModule | None) -> Iterable[Node]:
    """Return the inputs of a node, as `computed_from` counts them."""
    call: Any = node.args[0] if node.target is operator.getitem else None
    if owner is None or call is None or call.target is not torch.ops.higher_order.cond:
        return node.all_input_nodes
    predicate, *_, operands = call.args
    sources = [predicate]
    for body in bodies_of(owner, call).values():
        placeholders, results = ends(body)
        result: Any = results[node.args[1]]  # type: ignore[index]  # its place
        needed = computed_from(
            [result] if isinstance(result, Node) else [], values=True, owner=body
        )
        sources += [
            operand
            for inner, operand in zip(placeholders, operands, strict=True)
            if inner in needed
        ]
    return [each for each in sources if isinstance(each, Node)]


def arguments(node: Node) -> dict[str, Any]:
    """Return a node's arguments by their names in the schema, including defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    by_name = {a.name: a.default_value for a in schema if a.has_default_value()}
    by_name |= dict(zip([a.name for a in schema], node.args, strict=False))
    return by_name | dict(node.kwargs)
