"""Compute sizes that depend on the batch from the batch itself, so that a stage needs no other
stage's tensors for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import SymInt
from torch.fx import Graph, Node

from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import LazyGraphModule, ends

aten = torch.ops.aten
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def symbols_of(step: StepGraph) -> dict[str, tuple[str, int]]:
    """Return symbol of a size -> the batch input and the dim whose size it is."""
    placeholders, _ = ends(step.module)
    symbols: dict[str, tuple[str, int]] = {}
    for node, port in zip(placeholders, step.inputs, strict=True):
        if port.role is Role.BATCH:
            for at, size in enumerate(node.meta["val"].shape):
                if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                    symbols.setdefault(str(size.node.expr), (port.name, at))
    return symbols


def sizes_of_batch(step: StepGraph) -> StepGraph:
    """Return the same graph with every size computed from the batch's sizes. Data-dependent sizes
    stay as they are.
    """
    symbols = symbols_of(step)
    placeholders, _ = ends(step.module)
    inputs = {
        port.name: node
        for node, port in zip(placeholders, step.inputs, strict=True)
        if port.role is Role.BATCH
    }
    graph = Graph()
    copied: dict[Node, Node] = {}
    cache: dict[Any, Node | int] = {}

    def size(value: SymInt) -> Node | int | None:
        expression = value.node.expr
        if expression.is_Symbol and str(expression) not in symbols:
            return None
        if expression not in cache:
            computed = _compute(expression, size_of_symbol, graph)
            if computed is None:
                return None
            cache[expression] = computed
        return cache[expression]

    def size_of_symbol(symbol: sympy.Symbol) -> Node | None:
        if str(symbol) not in symbols:
            return None
        if symbol not in cache:
            name, at = symbols[str(symbol)]
            node = graph.call_function(aten.sym_size.int, (copied[inputs[name]], at))
            node.meta["val"] = inputs[name].meta["val"].shape[at]
            cache[symbol] = node
        symbol_node = cache[symbol]
        assert isinstance(symbol_node, Node)
        return symbol_node

    for node in step.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SymInt):
            size_node = size(value)
            if isinstance(size_node, Node):
                size_node.meta.setdefault("val", value)
                copied[node] = size_node
                continue
        copied[node] = graph.node_copy(node, lambda n: copied[n])
    return StepGraph(LazyGraphModule(step.module, graph), step.inputs, step.outputs)


def _compute(
    expression: Any, symbol: Callable[[sympy.Symbol], Node | None], graph: Graph
) -> Node | int | None:
    """Return a node that computes an expression; None if a part of it is not a size of the batch,
    or is an unknown function.
    """
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return symbol(expression)
    name = type(expression).__name__
    parts: list[Any] = list(expression.args)
    if name == "Pow" and parts[1].is_Integer and parts[1] > 0:
        parts, act = [parts[0]] * int(parts[1]), operator.mul
    elif name in ("Add", "Mul"):
        act = operator.add if name == "Add" else operator.mul
    elif name in _FUNCTIONS:
        act = _FUNCTIONS[name]
    else:
        return None
    operands = [_compute(part, symbol, graph) for part in parts]
    if any(part is None for part in operands):
        return None
    result: Any = operands[0]
    for part in operands[1:]:
        if not isinstance(result, Node) and not isinstance(part, Node):
            result = act(result, part)
            continue
        values = [each.meta["val"] if isinstance(each, Node) else each for each in (result, part)]
        result = graph.call_function(act, (result, part))
        result.meta["val"] = act(*values)
    computed: Node | int = result
    return computed


def shape_text(
    shape: torch.Size, symbols: Mapping[str, tuple[str, int]], where: str
) -> tuple[int | str, ...]:
    """Return a shape as data: numbers, and expressions (capture/guards/size_expressions.py) of the
    batch's symbols.

    Raises:
        PlanError: a size is data-dependent.
    """
    sizes: list[int | str] = []
    for size in shape:
        expression = size.node.expr if hasattr(size, "node") else sympy.Integer(size)
        if expression.is_Integer:
            sizes.append(int(expression))
            continue
        if any(str(symbol) not in symbols for symbol in expression.free_symbols):
            raise PlanError(
                "a tensor with a data-dependent size would be sent between stages",
                where=where,
                expected="sizes that depend only on the batch's sizes",
                got=str(tuple(shape)),
                hint=(
                    "Use another axis for this model, or keep the operators that compute and use it"
                    " on one stage."
                ),
            )
        sizes.append(_format(expression))
    return tuple(sizes)


def _format(expression: Any) -> str:
    name = type(expression).__name__
    if name in ("FloorDiv", "CleanDiv", "Mod", "PythonMod"):
        sign = "%" if "Mod" in name else "//"
        return f"({_format(expression.args[0])} {sign} {_format(expression.args[1])})"
    if name in ("Max", "Min"):
        return f"{name.lower()}({', '.join(_format(part) for part in expression.args)})"
    if name == "Pow":
        return "(" + " * ".join([_format(expression.args[0])] * int(expression.args[1])) + ")"
    if name in ("Add", "Mul"):
        return (
            "("
            + f" {'+' if name == 'Add' else '*'} ".join(_format(part) for part in expression.args)
            + ")"
        )
    return str(expression)
