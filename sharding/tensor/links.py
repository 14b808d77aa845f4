"""Tie the dims of a step graph's tensors together, operator by operator, and record what each
operator does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from trainload.capture.operators import is_overload
from trainload.sharding.tensor.factors import Dim, Dims, Factor, Factors, Size

Outputs = tuple[Dims | None, ...]
"""Dims of each output of a node; None for one that is not a tensor."""


@dataclass(slots=True)
class Use:
    """Use of the factors of an operator's operands. With all other factors it is unrestricted:
    shares of its operands yield the share of its result.

    Attributes:
        whole: factors on whose shares it cannot run.
        contracted: for each output, factors that it sums over: shares of them yield terms of a sum.
        special: factors on whose shares it can run in another way
            (`trainload.sharding.tensor.special`).
        once: operands that are added to the sum, so that only one term may include them.
        aside: operands that stay whole when it runs on shares of special factors.
    """

    whole: list[Factor] = field(default_factory=list)
    contracted: tuple[list[Factor], ...] = ()
    special: list[Factor] = field(default_factory=list)
    once: list[Node] = field(default_factory=list)
    aside: list[Node] = field(default_factory=list)


class Links:
    """The factors of every tensor of a graph, and the use of every node.

    Args:
        graph: functional graph of ATen operators; all nodes have `meta["val"]`.
    """

    def __init__(self, graph: Graph) -> None:
        self.factors = Factors()
        self.outputs: dict[Node, Outputs] = {}
        self.uses: dict[Node, Use] = {}
        for node in graph.nodes:
            if node.op != "output":
                self.outputs[node] = self._link(node)

    def dims(self, node: Node) -> Dims:
        """Return the dims of a node whose value is one tensor."""
        (dims,) = self.outputs[node]
        assert dims is not None, node
        return dims

    def has_dims(self, node: Node) -> bool:
        """Return True if a node's value is one tensor."""
        outputs = self.outputs.get(node, ())
        return (
            len(outputs) == 1
            and outputs[0] is not None
            and not isinstance(node.meta.get("val"), tuple | list)
        )

    def touched(self, node: Node) -> list[Dims]:
        """Return the dims of a node's operands and outputs."""
        operands = [
            dims for source in node.all_input_nodes for dims in self.outputs.get(source, ())
        ]
        return [dims for dims in (*operands, *self.outputs[node]) if dims is not None]

    def holds(self, dims: Dims | None, factor: Factor) -> bool:
        """Return True if a tensor with these dims has the factor."""
        return dims is not None and any(factor in self.factors.leaves(dim) for dim in dims)

    def tie(self, left: Sequence[Sequence[Factor]], right: Sequence[Sequence[Factor]]) -> None:
        """Make the dims of two tensors of the same shape the same."""
        for one, other in zip(left, right, strict=True):
            self.factors.tie(one, other)

    def use(self, node: Node) -> Use:
        """Return what a node does with factors."""
        return self.uses.setdefault(node, Use())

    def _link(self, node: Node) -> Outputs:
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None and node.op == "call_function" and is_overload(node.target):
            rule = RULES.get(node.target.overloadpacket)
            if rule is None and torch.Tag.pointwise in node.target.tags:
                rule = _POINTWISE[0]
        if rule is not None:
            return rule(self, node)
        return self.require_whole(node) if node.op == "call_function" else self.fresh(node)

    def require_whole(self, node: Node) -> Outputs:
        """Require whole operands for a node. Return dims of its outputs, tied to nothing."""
        whole = self.use(node).whole
        for source in node.all_input_nodes:
            for dims in self.outputs.get(source, ()):
                whole += [factor for dim in dims or () for factor in dim]
        outputs = self.fresh(node)
        whole += [factor for dims in outputs for dim in dims or () for factor in dim]
        return outputs

    def whole_dim(self, node: Node, size: Size) -> Dim:
        """Return a new dim of an operator's output, which must stay whole."""
        dim = self.factors.dim(size)
        self.use(node).whole += dim
        return dim

    def fresh(self, node: Node) -> Outputs:
        """Return dims of a node's outputs, tied to nothing."""
        values = node.meta.get("val")
        tensors = values if isinstance(values, tuple | list) else (values,)
        return tuple(
            self.factors.dims(sizes(value)) if isinstance(value, torch.Tensor) else None
            for value in tensors
        )


Rule = Callable[[Links, Node], Outputs]
RULES: dict[Any, Rule] = {}
"""Operator (or all its overloads) -> its rule, declared in rules.py and layer_rules.py. An operator
without a rule needs whole operands.
"""
_POINTWISE: list[Rule] = []


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Return a decorator that declares the rule of some operators."""

    def declare(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return declare


def pointwise(function: Rule) -> Rule:
    """Declare the rule of operators that have torch's pointwise tag and no rule of their own."""
    _POINTWISE.append(function)
    return function


def sizes(value: torch.Tensor) -> list[Size]:
    """Return a tensor's sizes: numbers, or expressions of symbols."""
    return [size_of(size) for size in value.shape]


def size_of(size: Any) -> Size:
    """Return a size as a number, or as an expression of symbols."""
    if isinstance(size, torch.SymInt):
        number = size.node.maybe_as_int()
        result: Size = size.node.expr if number is None else number
        return result
    return int(size)
