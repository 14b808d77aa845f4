"""Compute views of a call's operands inside the region.

The backward part of a layer reads much of what its forward part saved through views: transposed,
with other sizes, split. In the outer graph each would be an operator for every layer. A body that
receives what they are views of computes them itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node, map_arg

from trainload.autograd_trace.outlining.equality import is_element, is_part
from trainload.autograd_trace.outlining.signatures import (
    depends_on_memory,
    may_alias,
    numbers_of,
    operands_of,
    signature,
)

_Aligned = tuple[Node, ...]
"""An operand of a region: the node that each of its calls passes."""


def take_in_views(body: Graph, calls: Sequence[Node]) -> None:
    """Move views that all calls of a region pass into its body, in place.

    Parts and elements of flat tensors, which differ from call to call, stay outside.

    Args:
        body: the region's graph.
        calls: all calls of it, in one outer graph. Every node has `meta["val"]`. Views that nothing
            else reads are left without users.
    """
    inputs = body.find_nodes(op="placeholder")
    operands: list[_Aligned] = list(zip(*(call.args[2:] for call in calls), strict=True))
    inside = _Inside(body)
    views = []
    for node, aligned in zip(inputs, operands, strict=True):
        if _can_be_taken(aligned):
            views.append((node, aligned))
        else:
            inside.add(aligned, node)
    for node, aligned in views:
        node.replace_all_uses_with(inside.value(aligned))
        body.erase_node(node)
    for call, passed in zip(calls, zip(*inside.operands, strict=True), strict=True):
        call.args = (*call.args[:2], *passed)


class _Inside:
    """Values of a body that stand for values of the outer graph.

    Attributes:
        operands: what the calls pass, in the order of the body's inputs.
    """

    def __init__(self, body: Graph) -> None:
        self.operands: list[_Aligned] = []
        self._body = body
        self._first = next(node for node in body.nodes if node.op != "placeholder")
        self._values: dict[_Aligned, Node] = {}

    def add(self, aligned: _Aligned, node: Node) -> None:
        """Let an input of the body stand for an operand."""
        self._values[aligned] = node
        self.operands.append(aligned)

    def value(self, aligned: _Aligned) -> Node:
        """Return the node of the body for a view, or for what it reads; append it if needed."""
        if aligned not in self._values:
            if _can_be_taken(aligned):
                self._values[aligned] = self._view(aligned)
            else:
                self.add(aligned, self._input(aligned[0]))
        return self._values[aligned]

    def _view(self, aligned: _Aligned) -> Node:
        sources = zip(*map(operands_of, aligned), strict=True)
        values = iter([self.value(each) for each in sources])
        first = aligned[0]
        args: Any = map_arg(first.args, lambda _: next(values))
        kwargs: Any = map_arg(first.kwargs, lambda _: next(values))
        with self._body.inserting_before(self._first):
            node = self._body.create_node("call_function", first.target, args, kwargs)
        node.meta["val"] = first.meta["val"]
        return node

    def _input(self, first: Node) -> Node:
        with self._body.inserting_after(self._body.find_nodes(op="placeholder")[-1]):
            node = self._body.placeholder(f"source_{len(self.operands)}")
        node.meta["val"] = first.meta["val"]
        return node


def _can_be_taken(aligned: _Aligned) -> bool:
    """Return True if nodes are the same view of values of the same kind.

    A reshape that copies is taken in, too: the copy is then made by each call that reads it.
    """
    first = aligned[0]
    if not may_alias(first) or depends_on_memory(first):
        return False
    if is_part(first) or is_element(first):
        return False
    if len({(signature(node), numbers_of(node)) for node in aligned}) > 1:
        return False
    # what is taken from several results needs all of them, which cannot be an operand
    return first.target is not operator.getitem or _can_be_taken(
        tuple(operands_of(node)[0] for node in aligned)
    )
