"""Ties the dims of a step graph's tensors together, operator by operator, and notes what each operator does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from trainload.capture.operators import is_overload
from trainload.sharding.tensor.factors import Dim, Dims, Factor, Factors, Size

Outputs = tuple[Dims | None, ...]
"""Of each output of a node; None where it is no tensor."""


@dataclass(slots=True)
class Use:
    """What an operator does with the factors of its operands. In all others it is free: shares of its operands give the
    share of its result.

    whole: it cannot be run on shares of these.
    contracted: for each output: it is a sum over these, so that shares of them give terms of a sum.
    special: it can be run on shares of these, in another way (`trainload.sharding.tensor.special`).
    once: operands that are added to the sum, so that one term of it alone may hold them.
    aside: operands that are taken whole where it is run on shares of what is special.
    """

    whole: list[Factor] = field(default_factory=list)
    contracted: tuple[list[Factor], ...] = ()
    special: list[Factor] = field(default_factory=list)
    once: list[Node] = field(default_factory=list)
    aside: list[Node] = field(default_factory=list)


class Links:
    """The factors of every tensor of a graph, and the use of every node.

    Args:
        graph: functional, of ATen operators; all nodes have `meta["val"]`.
    """

    def __init__(self, graph: Graph) -> None:
        self.factors = Factors()
        self.outputs: dict[Node, Outputs] = {}
        self.uses: dict[Node, Use] = {}
        for node in graph.nodes:
            if node.op != "output":
                self.outputs[node] = self._link(node)

    def dims(self, node: Node) -> Dims:
        """The dims of a node that gives one tensor."""
        (found,) = self.outputs[node]
        assert found is not None, node
        return found

    def has_dims(self, node: Node) -> bool:
        """Whether a node gives one tensor."""
        found = self.outputs.get(node, ())
        return len(found) == 1 and found[0] is not None and not isinstance(node.meta.get("val"), tuple | list)

    def touched(self, node: Node) -> list[Dims]:
        """The dims of a node's operands and outputs."""
        operands = [dims for source in node.all_input_nodes for dims in self.outputs.get(source, ())]
        return [dims for dims in (*operands, *self.outputs[node]) if dims is not None]

    def holds(self, dims: Dims | None, factor: Factor) -> bool:
        """Whether a tensor of these dims has the factor."""
        return dims is not None and any(factor in self.factors.leaves(dim) for dim in dims)

    def tie(self, left: Sequence[Sequence[Factor]], right: Sequence[Sequence[Factor]]) -> None:
        """Makes the dims of two tensors of one shape the same."""
        for one, other in zip(left, right, strict=True):
            self.factors.tie(one, other)

    def use(self, node: Node) -> Use:
        """What a node does with factors."""
        return self.uses.setdefault(node, Use())

    def _link(self, node: Node) -> Outputs:
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None and node.op == "call_function" and is_overload(node.target):
            rule = RULES.get(node.target.overloadpacket)
            if rule is None and torch.Tag.pointwise in node.target.tags:
                rule = _POINTWISE[0]
        if rule is not None:
            return rule(self, node)
        return self.refuse(node) if node.op == "call_function" else self.fresh(node)

    def refuse(self, node: Node) -> Outputs:
        """The operator takes whole operands. Returns: dims of its outputs, tied to nothing."""
        whole = self.use(node).whole
        for source in node.all_input_nodes:
            for dims in self.outputs.get(source, ()):
                whole += [factor for dim in dims or () for factor in dim]
        made = self.fresh(node)
        whole += [factor for dims in made for dim in dims or () for factor in dim]
        return made

    def own(self, node: Node, size: Size) -> Dim:
        """A dim that an operator makes, as a whole."""
        made = self.factors.dim(size)
        self.use(node).whole += made
        return made

    def fresh(self, node: Node) -> Outputs:
        """Dims of a node's outputs, tied to nothing."""
        values = node.meta.get("val")
        tensors = values if isinstance(values, tuple | list) else (values,)
        return tuple(self.factors.dims(sizes(value)) if isinstance(value, torch.Tensor) else None for value in tensors)


Rule = Callable[[Links, Node], Outputs]
RULES: dict[Any, Rule] = {}
"""Operator (or all its overloads) -> its rule: rules.py and layer_rules.py declare them. One without a rule takes whole operands."""
_POINTWISE: list[Rule] = []


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Declares the rule of some operators."""

    def declare(made: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, made))
        return made

    return declare


def pointwise(made: Rule) -> Rule:
    """Declares the rule of operators that have torch's tag for pointwise ones, and none of their own."""
    _POINTWISE.append(made)
    return made


def sizes(value: torch.Tensor) -> list[Size]:
    """A tensor's sizes: numbers, or expressions of symbols."""
    return [size_of(size) for size in value.shape]


def size_of(size: Any) -> Size:
    """A number, or an expression of symbols."""
    if isinstance(size, torch.SymInt):
        known = size.node.maybe_as_int()
        found: Size = size.node.expr if known is None else known
        return found
    return int(size)
