"""Items of a step graph that must be assigned to pipeline stages, and the possible stages of each.

There are three kinds of values. *Free* values are computed from the batch, random numbers and
constants only: every stage that needs one computes it itself. *Derived* values are computed from
parameters only: a stage that holds the parameters computes them itself, in forward and again in
backward. All others are *placed*: one stage computes each and sends it to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.capture.operators import body_at, is_overload
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import computed_from, ends
from trainload.sharding.analysis.node_costs import bytes_of

aten = torch.ops.aten
Homes = Mapping[str, Sequence[int]]
"""Parameter or updated buffer -> the stages that hold it."""


@dataclass(eq=False, slots=True)
class Item:
    """A placed node, or an output, which is available at one stage.

    Attributes:
        node: the node; for an output, the node that is returned.
        output: index of the step graph's output; None for a node.
        backward: True if it belongs to the backward part.
        sources: placed items that it is computed from.
        homes: the stages that hold the parameters and buffers that it needs; None if it needs none.
        users: the inverse of `sources`.
        size: bytes of its value, in the example batch.
    """

    node: Node
    output: int | None
    backward: bool
    sources: list[Item]
    homes: frozenset[int] | None
    size: float
    number: int = -1
    users: list[Item] = field(default_factory=list)
    low: int = 0
    high: int = 0


class Items:
    """The items of a step graph.

    Args:
        step: the graph.
        homes: stages of its parameters, and of the buffers that it updates and that depend on more
            than free values.
        count: number of stages.

    Attributes:
        free, derived: nodes of these kinds.
        of: placed node -> its item.
        all: the items, sources first.

    Raises:
        PlanError: a gradient would have to be sent forward, or a buffer's readers and its new value
            cannot be on one stage.
    """

    def __init__(self, step: StepGraph, homes: Homes, count: int) -> None:
        self.step, self.count = step, count
        self._homes = {name: frozenset(stages) for name, stages in homes.items()}
        self._placeholders, self._results = ends(step.module)
        self._ports = dict(zip(self._placeholders, step.inputs, strict=True))
        nodes = [n for n in step.module.graph.nodes if n.op not in ("placeholder", "output")]
        begin = next((i for i, n in enumerate(nodes) if n.name == TANGENT), len(nodes))
        self.bodies = {n for n in nodes if body_at(step.module, n) is not None}
        self.free: dict[Node, None] = {}
        self.derived: dict[Node, frozenset[int]] = {}
        self._classify(nodes)
        self._late = set(nodes[begin:]) - self._before_backward()
        # an element of a tuple is taken on the stage that computes the tuple
        for node in nodes[begin:]:
            sources = [
                source
                for source in node.all_input_nodes
                if source.op == "call_function" and source not in self.free
            ]
            if any(source not in self._late and not is_sendable(source) for source in sources):
                self._late.discard(node)
        self.terms = {i: self._terms(node, i) for i, node in enumerate(self._results)}
        self._materialised: set[Node] = set()
        while True:
            self._make_items(nodes)
            lacking = self._bound()
            if not lacking:
                break
            self._materialised |= lacking
        self.of = {item.node: item for item in self.all if item.output is None}

    def _before_backward(self) -> set[Node]:
        """Return the nodes that forward's outputs are computed from; some may be located among the
        nodes of backward.
        """
        return computed_from(
            n
            for n, port in zip(self._results, self.step.outputs, strict=True)
            if port.role is not Role.GRADIENT
        )

    def _classify(self, nodes: Sequence[Node]) -> None:
        placed_buffers = {
            buffer
            for buffer, port in self._ports.items()
            if port.role is Role.BUFFER and port.name in self._homes
        }
        for node, port in self._ports.items():
            if port.role is Role.PARAMETER:
                self.derived[node] = self._homes[port.name]
            elif node not in placed_buffers:
                self.free[node] = None
        for node in nodes:
            sources = node.all_input_nodes
            if node in self.bodies or all(s in self.free or s in self.bodies for s in sources):
                self.free[node] = None
            elif self._is_derived(node) and (
                common := frozenset.intersection(*(self.derived[s] for s in sources))
            ):
                self.derived[node] = common

    def _is_derived(self, node: Node) -> bool:
        return (
            all(s in self.derived for s in node.all_input_nodes)
            and is_overload(node.target)
            and not node.target._schema.is_mutable
        )

    def _terms(self, result: Node, number: int) -> list[Node]:
        """Return the terms of an output: the gradients that several stages compute of a parameter
        that they share.
        """
        port = self.step.outputs[number]
        if port.role is not Role.GRADIENT or len(self._homes[port.name]) < 2:
            return [result]
        terms, stack = [], [result]
        while stack:
            node = stack.pop()
            if (
                node.target is aten.add.Tensor
                and len(node.users) == 1
                and not node.kwargs
                and all(isinstance(a, Node) for a in node.args)
            ):
                parts = [a for a in node.args if isinstance(a, Node)]
                if all(
                    p.meta["val"].shape == node.meta["val"].shape
                    and p.meta["val"].dtype == node.meta["val"].dtype
                    for p in parts
                ):
                    stack += parts[::-1]
                    continue
            terms.append(node)
        return terms

    def _make_items(self, nodes: Sequence[Node]) -> None:
        self.all: list[Item] = []
        sums = self._sums()
        items: dict[Node, Item] = {}
        for node in [*self._placeholders, *nodes]:
            if (
                node in self.free
                or node in sums
                or (node in self.derived and node not in self._materialised)
            ):
                continue
            port = self._ports.get(node)
            if port is not None and node not in self._materialised:
                continue  # a buffer with a home: its readers are on the same stage
            items[node] = self._add_item(
                node,
                None,
                node in self._late,
                [node] if node.op == "placeholder" else node.all_input_nodes,
                items,
            )
        for number, port in enumerate(self.step.outputs):
            if port.role is Role.BUFFER and port.name not in self._homes:
                continue  # every stage that reads it has its new value too
            for term in self.terms[number]:
                late = port.role is Role.GRADIENT
                item = self._add_item(term, number, late, [term], items)
                item.size = 0
                item.homes = (
                    self._homes[port.name]
                    if port.role in (Role.GRADIENT, Role.BUFFER)
                    else frozenset({self.count - 1})
                )

    def _sums(self) -> set[Node]:
        """Return the additions of terms, which no stage performs."""
        additions: set[Node] = set()
        for number, terms in self.terms.items():
            stack = [self._results[number]]
            while stack:
                node = stack.pop()
                if node not in terms:
                    additions.add(node)
                    stack += node.all_input_nodes
        return additions

    def _add_item(
        self,
        node: Node,
        output: int | None,
        late: bool,
        inputs: Sequence[Node],
        items: Mapping[Node, Item],
    ) -> Item:
        sources = list(dict.fromkeys(items[s] for s in inputs if s in items))
        homes: frozenset[int] | None = None
        for source in inputs:
            own = self._home(source)
            if own is not None and source not in items:
                homes = own if homes is None else homes & own
        item = Item(node, output, late, sources, homes, bytes_of(node), len(self.all))
        for each in sources:
            each.users.append(item)
        self.all.append(item)
        return item

    def _home(self, node: Node) -> frozenset[int] | None:
        if node in self.derived:
            return self.derived[node]
        port = self._ports.get(node)
        return self._homes.get(port.name) if port is not None and port.role is Role.BUFFER else None

    def _bound(self) -> set[Node]:
        """Set every item's `low` and `high`.

        Returns:
            Derived nodes that must be placed themselves, because no stage that holds their
            parameters is possible.
        """
        last = self.count - 1
        # forward goes up, backward down: first apply the limits of earlier items
        for item in self.all:
            early = [s for s in item.sources if not s.backward]
            late = [s for s in item.sources if s.backward]
            item.low = 0 if item.backward else max((s.low for s in early), default=0)
            item.high = min((s.high for s in late), default=last) if item.backward else last
            if item.homes is not None:
                fits = [h for h in item.homes if item.low <= h <= item.high]
                if not fits:
                    return self._sources_to_place(item)
                item.homes = frozenset(fits)
                item.low, item.high = max(item.low, min(fits)), min(item.high, max(fits))
        for item in reversed(self.all):  # then apply the limits of later ones
            for user in item.users:
                if user.backward == item.backward:
                    if item.backward:
                        item.low = max(item.low, user.low)
                    else:
                        item.high = min(item.high, user.high)
            if item.homes is not None:
                fits = [h for h in item.homes if item.low <= h <= item.high]
                if not fits:
                    return self._sources_to_place(item)
                item.homes = frozenset(fits)
                item.low, item.high = min(fits), max(fits)
        return set()

    def _sources_to_place(self, item: Item) -> set[Node]:
        needed = (
            {
                n
                for n in item.node.all_input_nodes
                if n in self.derived and n not in self._materialised
            }
            if item.output is None
            else set()
        )
        if needed:
            return needed
        port = None if item.output is None else self.step.outputs[item.output]
        raise PlanError(
            "the pipeline's stages cannot compute a value where it is needed",
            where=item.node.name if port is None else f"{port.role.value} {port.name}",
            expected=(
                "inputs of forward on the same or an earlier stage, inputs of backward on the same"
                " or a later one"
            ),
            got=(
                f"needed on stages {sorted(item.homes or ())}, possible on {item.low} to"
                f" {item.high}"
            ),
            hint="Let the planner choose the stages, or use another axis for this model.",
        )


def is_sendable(node: Node) -> bool:
    """Return True if a node's value can go from one graph to another: one tensor, and not a
    collective in flight.
    """
    started = str(node.target).startswith("_c10d_functional.") and "wait_tensor" not in str(
        node.target
    )
    return isinstance(node.meta["val"], torch.Tensor) and not started


def updated_buffers(step: StepGraph) -> list[str]:
    """Return the buffers whose new value depends on parameters, and which therefore have a home."""
    placeholders, results = ends(step.module)
    outputs = {
        port.name: node
        for port, node in zip(step.outputs, results, strict=True)
        if port.role is Role.BUFFER
    }
    parameters = {
        placeholder
        for placeholder, port in zip(placeholders, step.inputs, strict=True)
        if port.role is Role.PARAMETER
    }
    return [name for name, node in outputs.items() if parameters & computed_from([node])]
