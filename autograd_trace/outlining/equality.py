"""Decide whether two graphs compute the same expressions of their inputs.

Every value gets a number that is equal for equal expressions: the same operator on the same values.
Calls of regions are followed into their bodies. If all outputs of two graphs have equal numbers,
the graphs are bitwise equal, whatever their inputs are, provided that operators are deterministic
functions of their arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from trainload.autograd_trace.outlining.masks import PACKED
from trainload.autograd_trace.outlining.signatures import argument, is_size
from trainload.capture.operators import body_at

aten = torch.ops.aten
CALL = torch.ops.higher_order.invoke_subgraph
"""The operator that calls a region: (body, identifier, *operands) -> results."""


def differing_output(one: GraphModule, other: GraphModule) -> int | None:
    """Return the index of the first output that two flat graphs do not compute by the same
    expression of their inputs; None if there is none.
    """
    numbering = _Numbering()
    outputs = [numbering.outputs(module) for module in (one, other)]
    if len(outputs[0]) != len(outputs[1]):
        return min(map(len, outputs))
    pairs = zip(*outputs, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)


class _Numbering:
    """Numbers of the expressions of all graphs that are compared."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._conversions: dict[Hashable, tuple[Hashable, torch.dtype]] = {}
        """Number of a converted tensor -> the number of the tensor, its dtype."""
        self._parts: dict[Hashable, tuple[Hashable, int]] = {}
        """Number of a part of a flat tensor -> the number of the tensor, the part's start."""
        self._collections: dict[Hashable, tuple[Hashable, ...]] = {}
        """Number of a flat tensor that was collected from others -> their numbers."""

    def outputs(
        self, module: GraphModule, operands: Sequence[Hashable] | None = None
    ) -> list[Hashable]:
        """Return the numbers of a graph's outputs.

        Args:
            module: the graph.
            operands: numbers of its inputs; None to number them by their places.
        """
        values: dict[Node, Hashable] = {}
        results: dict[Node, list[Hashable]] = {}  # of the calls of regions
        inputs = 0
        for node in module.graph.nodes:
            if node.op == "output":
                outputs: Iterable[Any] = node.args[0]
                return [values[each] for each in outputs]
            if node.op == "placeholder":
                values[node] = (
                    self._number(("input", inputs)) if operands is None else operands[inputs]
                )
                inputs += 1
            elif node.op == "get_attr":
                values[node] = self._number(("attribute", str(node.target)))
            elif is_size(node):
                values[node] = self._number(("size", str(node.meta["val"])))
            elif node.target is CALL:
                body = body_at(module, node.args[0])
                assert body is not None, "the call of a region names its body"
                results[node] = self.outputs(body, [values[each] for each in node.args[2:]])
            elif node.target is operator.getitem and node.args[0] in results:
                values[node] = results[node.args[0]][node.args[1]]
            else:
                values[node] = self._computed(node, values)
        raise AssertionError("a graph has an output")

    def _number(self, expression: Hashable) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))

    def _computed(self, node: Node, values: dict[Node, Hashable]) -> Hashable:
        """Return the number of an operator's result.

        A mask that was packed and unpacked is the mask, a part or an element of a part of a flat
        tensor is one of the tensor, and what was collected in two steps was collected in one.
        """
        if is_part(node):
            return self._part(node, values)
        if is_element(node):
            return self._element(node, values)
        if is_collection(node):
            return self._collection(node, values)
        number = self._number((node.target, _form(node.args, values), _form(node.kwargs, values)))
        if node.target is torch.ops.aten._to_copy.default:
            source: Any = node.args[0]
            self._conversions[number] = (values[source], source.meta["val"].dtype)
        elif node.target is torch.ops.aten.ne.Scalar and node.args[1] == 0:
            return self._unpacked(values[node.args[0]], number)  # type: ignore[index]  # a node
        return number

    def _unpacked(self, value: Hashable, number: Hashable) -> Hashable:
        """Return the number of the mask that was packed into `value`; `number` if none was."""
        for dtype in reversed(PACKED):
            value, source = self._conversions.get(value, (None, None))
            if source is not dtype:
                return number
        return value

    def _part(self, node: Node, values: dict[Node, Hashable]) -> Hashable:
        source: Any = node.args[0]
        whole, before = self._parts.get(values[source], (values[source], 0))
        start = before + argument(node, 2, 0)
        number = self._number(("part", whole, start, node.meta["val"].shape[0]))
        self._parts[number] = (whole, start)
        return number

    def _element(self, node: Node, values: dict[Node, Hashable]) -> Hashable:
        source: Any = node.args[0]
        whole, before = self._parts.get(values[source], (values[source], 0))
        return self._number(("element", whole, before + node.args[2]))  # type: ignore[operator]

    def _collection(self, node: Node, values: dict[Node, Hashable]) -> Hashable:
        entries: Any = node.args[0]
        numbers = [values[entry] for entry in entries]
        parts = tuple(part for n in numbers for part in self._collections.get(n, (n,)))
        number = self._number(("collection", *parts))
        self._collections[number] = parts
        return number


def is_part(node: Node) -> bool:
    """Return True if a node is a contiguous part of a flat tensor, both of static size."""
    if node.target is not aten.slice.Tensor:
        return False
    source: Any = node.args[0]
    start, step = argument(node, 2, 0), argument(node, 4, 1)
    sizes = [*source.meta["val"].shape, *node.meta["val"].shape]
    is_static = all(isinstance(size, int) for size in (*sizes, start))
    return len(sizes) == 2 and is_static and start >= 0 and bool(step == 1)


def is_element(node: Node) -> bool:
    """Return True if a node is one element of a flat tensor of static size."""
    if node.target is not aten.select.int:
        return False
    source: Any = node.args[0]
    index: Any = node.args[2]
    sizes = source.meta["val"].shape
    return len(sizes) == 1 and all(isinstance(n, int) for n in (*sizes, index)) and index >= 0


def is_collection(node: Node) -> bool:
    """Return True if a node collects flat tensors of one dtype in a flat tensor."""
    if node.target is not aten.cat.default:
        return False
    entries: Any = node.args[0]
    values = [entry.meta["val"] for entry in entries]
    is_first = bool(argument(node, 1, 0) == 0)
    return is_first and {(v.ndim, v.dtype) for v in values} == {(1, values[0].dtype)}


def _form(arguments: Any, values: dict[Node, Hashable]) -> Hashable:
    """Return arguments as a key, with the numbers of values in place of nodes."""
    if isinstance(arguments, Node):
        return ("value", values[arguments])
    if isinstance(arguments, dict):
        return tuple((name, _form(value, values)) for name, value in sorted(arguments.items()))
    if isinstance(arguments, list | tuple):
        return tuple(_form(each, values) for each in arguments)
    return (type(arguments).__name__, repr(arguments))
