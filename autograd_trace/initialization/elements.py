"""Evaluates a graph of first values at some elements, without the tensor as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from trainload.autograd_trace.initialization.element_rules import (
    EMPTY,
    RULES,
    broadcast_index,
    is_pointwise,
    moves,
    never_written,
)
from trainload.capture.initialization.initial_graphs import output_of

BLOCK = 2**15
"""Elements that are computed at once. Operators use one thread for so many, and a vector's last
elements are computed by other code than the others, so blocks have fixed places: an element has the
same bits whichever part of a tensor is read.
"""
WHOLE_LIMIT = 2 * 2**30
"""Maximum bytes of the tensors that are computed whole for one tensor."""

_TABLE = 64 * 2**20
"""Maximum bytes of the tensors of a table that is computed whole although it need not be."""

_MOST_NODES = 100
_MOST_EVALUATIONS = 300
"""Nodes of a graph, and evaluations of nodes for a block, if it is computed element by element."""

Read = Callable[[Tensor], Tensor]
"""Returns elements of a flattened tensor: int64 (n,) -> (n,)."""


class Elements:
    """The value of a graph's output.

    Args:
        module: flat graph of one output, without mutation (`InitialGraph.module`).
        inputs: reads elements of each input.
    """

    def __init__(self, module: GraphModule, inputs: Sequence[Read]) -> None:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._inputs: dict[Node, Read] = dict(zip(placeholders, inputs, strict=True))
        self._output = output_of(module)
        self._whole: dict[Node, Any] = {}
        self._blocks: dict[int, Tensor] = {}
        self.elementwise = is_elementwise(module)

    @torch.no_grad()
    def slice(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened output, of shape (stop - start,)."""
        if not self.elementwise:
            flat: Tensor = self.whole(self._output).reshape(-1)
            return flat[start:stop].clone()
        value: Tensor = self._output.meta["val"]
        result = torch.empty(stop - start, dtype=value.dtype)
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = number * BLOCK, min((number + 1) * BLOCK, value.numel())
            block = self._block(number, last)
            low, high = max(start, first), min(stop, last)
            result[low - start : high - start] = block[low - first : high - first]
        return result

    def _block(self, number: int, stop: int) -> Tensor:
        if number not in self._blocks:
            if len(self._blocks) > 1:
                self._blocks.pop(next(iter(self._blocks)))
            index = torch.arange(number * BLOCK, stop)
            self._blocks[number] = _Evaluation(self).at(self._output, index)
        return self._blocks[number]

    def read_input(self, node: Node, index: Tensor) -> Tensor:
        """Return elements of an input."""
        return self._inputs[node](index)

    def whole(self, node: Node) -> Any:
        """Return the value of a node, computed whole once and kept."""
        if node not in self._whole:
            values: dict[Node, Any] = {}
            with _one_thread():
                for each, dropped in _with_last_uses(_needed(node)):
                    values[each] = self._call(each, values)
                    for source in dropped:
                        del values[source]
            self._whole[node] = values[node]
        return self._whole[node]

    def _call(self, node: Node, values: Mapping[Node, Any]) -> Any:
        if node.op == "placeholder":
            value = node.meta["val"]
            read = self._inputs[node]
            parts = [
                read(torch.arange(first, min(first + BLOCK, value.numel())))
                for first in range(0, value.numel(), BLOCK)
            ]
            flat = torch.cat(parts) if parts else torch.empty(0, dtype=value.dtype)
            return flat.reshape(value.shape)
        if node.target in EMPTY:
            value = node.meta["val"]
            return never_written(value.dtype).expand(value.shape)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        operator: Any = node.target
        # The graph was traced over tensors with other strides, which its views fit.
        return map_aggregate(operator(*args, **kwargs), _contiguous)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def is_elementwise(module: GraphModule) -> bool:
    """Return True if the output is computed element by element.

    A small table without draws is not: it is computed by the same calls as in eager mode, and so
    has the same bits. Nor is the output of a graph that would evaluate its nodes very often.
    """
    needed = _needed(output_of(module))
    if all(node.op != "placeholder" for node in needed) and _peak(needed) <= _TABLE:
        return False
    return (
        all(
            node.op == "placeholder" or node.target in RULES or is_pointwise(node)
            for node in needed
        )
        and len(needed) <= _MOST_NODES
        and _evaluations(needed) <= _MOST_EVALUATIONS
    )


def _evaluations(needed: Sequence[Node]) -> int:
    """Return how often nodes are evaluated for one block; more than _MOST_EVALUATIONS counts as
    that plus one.

    A node is evaluated once for each set of places at which its users need it, and a rule that
    moves elements needs its arguments at a set of its own.
    """
    places: dict[Node, set[tuple[Node, ...]]] = {node: set() for node in needed}
    places[needed[-1]].add(())
    total = 0
    for node in reversed(needed):
        total += len(places[node])
        if total > _MOST_EVALUATIONS:
            return _MOST_EVALUATIONS + 1
        for source, moved in moves(node):
            places[source] |= {(*path, node, source) if moved else path for path in places[node]}
    return total


def whole_bytes(module: GraphModule) -> int:
    """Return the maximum number of bytes of the tensors that are kept while the output is computed
    whole; 0 if it is computed element by element.
    """
    return 0 if is_elementwise(module) else _peak(_needed(output_of(module)))


def _peak(nodes: Sequence[Node]) -> int:
    held = most = 0
    for node, dropped in _with_last_uses(nodes):
        held += _nbytes(node)
        most = max(most, held)
        held -= sum(_nbytes(each) for each in dropped)
    return most


def _with_last_uses(nodes: Sequence[Node]) -> Iterator[tuple[Node, list[Node]]]:
    """Yield each node with those that are not needed after it."""
    last = {source: node for node in nodes for source in node.all_input_nodes}
    for node in nodes:
        yield node, [source for source in node.all_input_nodes if last[source] is node]


def _needed(node: Node) -> list[Node]:
    """Return the nodes that a node needs, itself included, in order."""
    needed: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in needed:
            continue
        needed.add(current)
        pending += current.all_input_nodes
    return [each for each in node.graph.nodes if each in needed]


def _nbytes(node: Node) -> int:
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    return sum(each.numel() * each.dtype.itemsize for each in values if isinstance(each, Tensor))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: how a sum is divided would depend on the number of ranks of a machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Evaluation:
    """Values of nodes at some elements, for one block."""

    def __init__(self, elements: Elements) -> None:
        self._elements = elements
        self._known: dict[tuple[Node, int], tuple[Tensor, Tensor]] = {}

    def at(self, node: Node, index: Tensor) -> Tensor:
        """Return elements of a node: int64 (n,) -> (n,)."""
        key = node, id(index)
        if key not in self._known:
            # with the index, so that its id is not used again
            self._known[key] = self._compute(node, index), index
        return self._known[key][0]

    def _compute(self, node: Node, index: Tensor) -> Tensor:
        if node.op == "placeholder":
            return self._elements.read_input(node, index)
        rule = RULES.get(node.target)
        if rule is not None:
            return rule(self, node, index)
        return self._pointwise(node, index)

    def broadcast(self, node: Node, shape: Sequence[int], index: Tensor) -> Tensor:
        """Return elements of a node that is broadcast to a shape."""
        own = node.meta["val"].shape
        if tuple(own) == tuple(shape):
            return self.at(node, index)
        if not own:
            single: Tensor = self._elements.whole(node)
            return single
        return self.at(node, broadcast_index(index, shape, own)).expand(index.shape)

    def _pointwise(self, node: Node, index: Tensor) -> Tensor:
        shape = node.meta["val"].shape
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda each: self.broadcast(each, shape, index)
        )
        operator: Any = node.target
        result: Tensor = operator(*args, **kwargs)
        return result.expand(index.shape)
