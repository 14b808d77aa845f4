"""Compute the scalars of all random operators at once.

Every random operator derives a few 0-dim integers from the key of the call and a constant of its
own, its site (randomness/random_key.py). They are the only numbers by which the random operators of
two layers differ, and a compiler would compute them again for every element. As elements of a
vector over all sites they are operands of a layer instead, and take a few operators in all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from trainload.autograd_trace.graph_calls import append
from trainload.autograd_trace.outlining.signatures import operands_of

aten = torch.ops.aten
_ELEMENTWISE = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.sub.Tensor,
        aten.bitwise_and.Scalar,
        aten.bitwise_and.Tensor,
        aten.bitwise_xor.Scalar,
        aten.bitwise_xor.Tensor,
        aten.__rshift__.Scalar,
        aten._to_copy.default,
    }
)
_LEAST_SCALARS = 2
_MOST_UNUSED = 4
"""Elements that a vector may have for each one that is used."""

_Family = dict[int, list[Node]]
"""Constant -> the nodes that compute the same function of it."""


def stack_scalars(graph: Graph) -> int:
    """Replace integer scalars that are the same function of different constants by elements of a
    vector. In place; no value changes.

    Args:
        graph: a flat graph whose nodes have `meta["val"]`.

    Returns:
        Number of scalars that were replaced.
    """
    by_source: dict[Node, _Family] = defaultdict(dict)
    for node in graph.nodes:
        if node.target is aten.add.Tensor and _is_scalar(node) and len(node.args) == 2:
            source, constant = node.args
            if isinstance(source, Node) and _is_scalar(source) and type(constant) is int:
                by_source[source].setdefault(constant, []).append(node)
    families = [family for family in by_source.values() if len(family) >= _LEAST_SCALARS]
    return sum(_Stacker(graph, family).run() for family in families)


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.ndim and not value.is_floating_point()


def _is_elementwise(node: Node) -> bool:
    return (
        node.target in _ELEMENTWISE
        and _is_scalar(node)
        and all(_is_scalar(operand) for operand in operands_of(node))
    )


def _progression(family: _Family) -> range:
    """Return the shortest arithmetic progression that has all constants of a family."""
    ordered = sorted(family)
    step = math.gcd(*(constant - ordered[0] for constant in ordered[1:]))
    return range(ordered[0], ordered[-1] + 1, step)


class _Stacker:
    """Replaces a family of sums, and all families that are computed from it, by vectors.

    The vectors are inserted as early as possible, so that they are not between the operators of a
    layer.
    """

    def __init__(self, graph: Graph, root: _Family) -> None:
        self._graph = graph
        self._constants = _progression(root)
        self._place = {node: float(index) for index, node in enumerate(graph.nodes)}
        self._families: list[_Family] = []
        self._vectors: list[Node] = []
        self._member: dict[Node, tuple[int, int]] = {}  # node -> number of its family, constant
        self._last: Node | None = None  # the node that was inserted last
        self._add(root)
        self._mode: Any = next(iter(self._member)).meta["val"].fake_mode

    def run(self) -> int:
        """Return the number of nodes that were replaced."""
        root = self._families[0]
        if len(self._constants) > _MOST_UNUSED * len(root):
            return 0
        for family in self._families:  # grows
            self._vectors.append(self._make_vector(next(iter(family.values()))[0]))
            for found in self._computed_from(family):
                self._add(found)
        for number, family in enumerate(self._families):
            for constant, nodes in family.items():
                self._select(self._vectors[number], constant, nodes)
        for node in sorted(self._member, key=self._place.__getitem__, reverse=True):
            self._graph.erase_node(node)
        for vector in reversed(self._vectors):
            if not vector.users:
                self._graph.erase_node(vector)
        return len(self._member)

    def _add(self, family: _Family) -> None:
        number = len(self._families)
        self._families.append(family)
        self._member |= {node: (number, c) for c, nodes in family.items() for node in nodes}

    def _computed_from(self, family: _Family) -> list[_Family]:
        """Return new families with an operand in a family, one node or more for each constant."""
        candidates: dict[Hashable, _Family] = defaultdict(dict)
        for constant, nodes in family.items():
            for node in dict.fromkeys(user for each in nodes for user in each.users):
                if node not in self._member and _is_elementwise(node):
                    form = self._form(node, constant)
                    if form is not None:
                        candidates[form].setdefault(constant, []).append(node)
        return [each for each in candidates.values() if each.keys() == family.keys()]

    def _form(self, node: Node, constant: int) -> Hashable:
        """Return a key that is equal for nodes that compute the same function of their constants;
        None if a node depends on another constant as well.
        """
        members = self._member
        if any(members.get(each, (0, constant))[1] != constant for each in operands_of(node)):
            return None

        def spell(operand: Node) -> Any:
            number = members[operand][0] if operand in members else None
            return ("node", operand.name) if number is None else ("family", number)

        return (node.target, repr(torch.fx.map_arg((node.args, node.kwargs), spell)))

    def _make_vector(self, example: Node) -> Node:
        """Insert the vector of the family that a node belongs to."""
        value: Any = example.meta["val"]
        if not self._vectors:
            self._last = self._lead(example.args[0])
            options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
            constants = self._constants
            table = self._insert(
                aten.arange.start_step, (constants.start, constants.stop, constants.step), options
            )
            return self._insert(example.target, (example.args[0], table), {})

        def outer(operand: Node) -> Node:
            return self._vectors[self._member[operand][0]] if operand in self._member else operand

        args = torch.fx.map_arg(example.args, outer)
        for operand in operands_of(example):
            if operand not in self._member and self._place[operand] > self._place[self._last]:
                self._last = operand
        return self._insert(example.target, args, dict(example.kwargs))

    def _lead(self, source: Any) -> Node:
        """Return the node after which a function of `source` can be inserted."""
        node: Node = source
        while node.op == "placeholder" and node.next.op == "placeholder":
            node = node.next
        return node

    def _insert(self, target: Any, args: Any, kwargs: dict[str, Any]) -> Node:
        last = self._last
        assert last is not None, "the root is inserted after its source"
        with self._graph.inserting_after(last):
            node = append(self._graph, self._mode, target, *args, **kwargs)
        self._place[node] = self._place[last]
        self._last = node
        return node

    def _select(self, vector: Node, constant: int, nodes: list[Node]) -> None:
        """Make the users of nodes, apart from members of families, read one element of a vector."""
        members = self._member
        if all(user in members for node in nodes for user in node.users):
            return
        index = self._constants.index(constant)
        with self._graph.inserting_after(vector):
            element = append(self._graph, self._mode, aten.select.int, vector, 0, index)
        for node in nodes:
            node.replace_all_uses_with(element, delete_user_cb=lambda user: user not in members)
