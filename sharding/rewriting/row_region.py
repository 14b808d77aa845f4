"""Find the part of a step graph between the last product before a loss and the product's gradients,
such that it can be computed for some rows at a time.

A language model's logits (rows x vocabulary) and their gradient are usually its largest tensors.
All that needs them works by row, or sums over rows.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.autograd_trace.recompute.rematerialisation import RECOMPUTES
from trainload.capture.operators import is_overload
from trainload.sharding.analysis.graph_nodes import arguments, computed_from, ends
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.rewriting.row_layouts import (
    Form,
    Layout,
    NotByRowError,
    RowCall,
    Space,
    is_same_size,
    leading,
)
from trainload.sharding.rewriting.row_rules import RowRules

aten = torch.ops.aten
_OF_ROWS = {aten.mm, aten.addmm}


@dataclass(frozen=True, slots=True)
class RowRegion:
    """Nodes that are computed for some rows at a time.

    Laws: no node outside lies between two of them; every tensor of rows that is wider than the
    first product's operand is used inside only.

    Attributes:
        seed: the first product.
        calls: the nodes, in the graph's order.
        rules: rules for the number of rows.
    """

    seed: Node
    calls: Mapping[Node, RowCall]
    rules: RowRules


def last_products(step: StepGraph) -> list[Node]:
    """Return the products of rows and a matrix from which losses are computed without another
    product, and the recomputations of these in backward.

    Products much narrower than the widest are left out, such as the scores of a router.
    """
    _, results = ends(step.module)
    losses = [r for r, p in zip(results, step.outputs, strict=True) if p.role is Role.LOSS]
    stack, reached = losses, set(losses)
    products: list[Node] = []
    while stack:
        node = stack.pop()
        if flops(node):
            products.append(node)
            continue
        sources = [s for s in node.all_input_nodes if s not in reached]
        reached.update(sources)
        stack += sources
    names = {node.name for node in products}
    products += [n for n in step.module.graph.nodes if n.meta.get(RECOMPUTES) in names]
    candidates = [
        node
        for node in products
        if is_overload(node.target)
        and node.target.overloadpacket in _OF_ROWS
        and isinstance(node.meta["val"].shape[1], int)
    ]
    widest = max((node.meta["val"].shape[1] for node in candidates), default=0)
    return [node for node in candidates if 2 * node.meta["val"].shape[1] >= widest]


def _operand(product: Node) -> Node:
    """Return the product's operand with rows."""
    operand = product.args[-2]
    assert isinstance(operand, Node)
    return operand


def find_region(module: GraphModule, seed: Node) -> RowRegion:
    """Return the region that begins with a product.

    Args:
        module: a graph with a node for each value.
        seed: one of its `last_products`.

    Raises:
        NotByRowError: a node that needs the product's result, or a tensor as wide, does not work by
            row; or such a tensor is a result of the graph.
    """
    return _Search(module, seed).run()


class _Search:
    def __init__(self, module: GraphModule, seed: Node) -> None:
        self._nodes = list(module.graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._seed = seed
        count = seed.meta["val"].shape[0]
        self._rules = RowRules(count, _selection(seed, count))
        self._width = int(seed.meta["val"].shape[1])
        self._operand_width = int(_operand(seed).meta["val"].shape[1])
        self._calls: dict[Node, RowCall] = {}
        self._known: dict[Node, Layout] = {}

    def run(self) -> RowRegion:
        self._add(self._seed, known={_operand(self._seed): Layout(Form.ROWS)})
        self._add_users()
        while between := self._between():
            for node in between:
                self._add(node)
            self._add_users()
        ordered = sorted(self._calls, key=self._place.__getitem__)
        self._check_results()
        return RowRegion(self._seed, {node: self._calls[node] for node in ordered}, self._rules)

    def _check_results(self) -> None:
        """Raise NotByRowError if a result that is needed outside cannot be put together."""
        for node, call in self._calls.items():
            if call.layout.form is Form.SUM or all(user in self._calls for user in node.users):
                continue
            if call.layout.form is not Form.ROWS:
                raise NotByRowError(node, "is needed whole")
            if self._rules.selection is not None and call.layout.space is Space.ALL:
                raise NotByRowError(node, "is needed for rows that are not selected")

    def _add(
        self,
        node: Node,
        wanted: Layout | None = None,
        known: Mapping[Node, Layout] | None = None,
    ) -> None:
        """Add a node, and first the wide tensors of rows that it needs."""
        call = self._rules.call(node, self._known if known is None else known, wanted)
        if wanted is not None and call.layout != wanted:
            raise NotByRowError(node, "has its rows in other dims than needed")
        for operand, layout in call.operands.items():
            if (
                layout is not None
                and operand not in self._known
                and self._rules.width(operand.meta["val"], layout) > self._operand_width
            ):
                self._add_operand(operand, layout)
        self._calls[node] = call
        self._known[node] = call.layout

    def _add_operand(self, operand: Node, layout: Layout) -> None:
        """Add a wide operand, if it can be computed by row; otherwise it is sliced, as others."""
        before = dict(self._calls), dict(self._known)
        try:
            if operand.op != "placeholder":
                self._add(operand, layout)
        except NotByRowError:
            self._calls, self._known = before

    def _is_wide(self, node: Node, layout: Layout) -> bool:
        """Return True if a tensor of rows is as wide as the logits, and not the gradient of their
        operand.
        """
        width = min(self._width, self._operand_width + 1)
        return (
            layout.form is not Form.SUM
            and self._rules.width(node.meta["val"], layout) >= width
            and (width > self._operand_width or node is self._seed or not flops(node))
        )

    def _add_users(self) -> None:
        """Add all that reads a wide tensor of rows."""
        for node in self._nodes[self._place[self._seed] :]:
            if node not in self._calls and any(
                source in self._calls
                and (node.target is operator.getitem or self._is_wide(source, self._known[source]))
                for source in node.all_input_nodes
            ):
                if node.op == "output":
                    raise NotByRowError(node, "is a result of the graph")
                self._add(node)

    def _between(self) -> list[Node]:
        """Return the nodes outside that lie between two of the region."""
        after = set(self._calls)
        first, last = (pick(map(self._place.__getitem__, after)) for pick in (min, max))
        span = self._nodes[first : last + 1]
        for node in span:
            if not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        before: set[Node] = set()
        for node in reversed(span):
            if node in self._calls or node in before:
                before.update(node.all_input_nodes)
        return [n for n in span if n in after and n in before and n not in self._calls]


def _selection(product: Node, count: Any) -> Node | None:
    """Return the first `slice` of a product's rows that drops some; None if there is none."""
    stack, reached = [product], {product}
    while stack:
        node = stack.pop()
        for user in sorted(set(node.users) - reached, key=lambda each: each.name):
            if not is_overload(user.target):
                continue
            reached.add(user)
            if user.target.overloadpacket is aten.slice and _drops_rows(user, count):
                return user
            value = user.meta.get("val")
            if isinstance(value, Tensor) and _has_rows(value, count, node.meta["val"].numel()):
                stack.append(user)
    return None


def _drops_rows(node: Node, count: Any) -> bool:
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = source.meta["val"].shape, node.meta["val"].shape
    lead, args = leading(before, count), arguments(node)
    dim = args["dim"] % len(before)
    return (
        lead is not None
        and dim < lead
        and not is_same_size(before[dim], after[dim])
        and not any(isinstance(bound, Node) for bound in args.values() if bound is not source)
    )


def _has_rows(value: Tensor, count: Any, elements: Any) -> bool:
    return leading(value.shape, count) is not None and is_same_size(value.numel(), elements)


def hoisted(region: RowRegion, placed: set[Node]) -> list[Node]:
    """Return the nodes outside a region that it needs and that are not in `placed`, in order."""
    operands = {s for node in region.calls for s in node.all_input_nodes}
    needed = computed_from(operands - region.calls.keys()) - placed
    return [node for node in region.seed.graph.nodes if node in needed]


def first_use(region: RowRegion) -> Node:
    """Return the first node that uses a result of a region; the beginning of backward, at the
    latest, for a region that begins in forward.
    """
    nodes: list[Node] = list(region.seed.graph.nodes)
    return next(
        node
        for node in nodes[nodes.index(region.seed) :]
        if node.op == "output"
        or node.name == TANGENT
        or (
            node not in region.calls
            and any(source in region.calls for source in node.all_input_nodes)
        )
    )
