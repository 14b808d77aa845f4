"""Cut a step graph into the graphs of a pipeline's stages, and determine the values sent between
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import SymInt
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.graph_calls import append
from trainload.autograd_trace.graphs import TANGENT, Port, Role, StepGraph
from trainload.sharding.analysis.graph_nodes import LazyGraphModule, ends, mode_of
from trainload.sharding.analysis.node_costs import number
from trainload.sharding.pipeline.cut import stages_of
from trainload.sharding.pipeline.items import Homes, Item, Items, is_sendable
from trainload.sharding.pipeline.sizes import shape_text, sizes_of_batch, symbols_of

aten = torch.ops.aten


class Part(StrEnum):
    """A part of a stage's work on a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass."""
    INPUT = "I"
    """The part of backward that the previous stage waits for."""
    WEIGHT = "W"
    """The rest of backward."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that is sent between stages: its name, its dtype in torch's notation, and its sizes
    (numbers or expressions of the batch's symbols).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """A step graph, cut into stages.

    Laws: calling the stages' FORWARD in order, then their BACKWARD (or INPUT and WEIGHT) in
    reverse, each with the values that its inputs name, computes the same as the graph; the gradient
    of a parameter is the sum of the gradients that the stages return. Inputs of a part with the
    roles ACTIVATION, COTANGENT and SAVED are values by name, which an earlier part of the stage
    returns or which `up` or `down` brings.

    Attributes:
        parts: (stage, part) -> its graph. A graph that does nothing is left out.
        up: entry k has the values that stage k sends to stage k + 1 after FORWARD, its own and
            those sent to it.
        down: entry k has the values that stage k + 1 sends to stage k in backward (after INPUT, if
            backward is divided).
        symbols: symbol in the values' sizes -> the batch input and the dim whose size it is.
        example: symbol -> that size in the example batch.
    """

    parts: Mapping[tuple[int, Part], StepGraph]
    up: tuple[tuple[Value, ...], ...]
    down: tuple[tuple[Value, ...], ...]
    symbols: Mapping[str, tuple[str, int]]
    example: Mapping[str, int]


def cut(step: StepGraph, homes: Homes, count: int) -> Stages:
    """Cut a step graph into `count` stages.

    Args:
        step: the graph, with or without gradients.
        homes: parameter -> the stages that hold it; buffer that the graph updates -> its stage, if
            it depends on parameters.
        count: number of stages.

    Raises:
        PlanError: the graph cannot be cut so: a value would be needed where it cannot be, or the
            data decide the size of a value to send.
    """
    return _Cutter(sizes_of_batch(step), homes, count).run()


class _Cutter:
    def __init__(self, step: StepGraph, homes: Homes, count: int) -> None:
        self._step, self._count = step, count
        self._items = Items(step, homes, count)
        self._stage = stages_of(self._items)
        self._placeholders, self._results = ends(step.module)
        self._ports = dict(zip(self._placeholders, step.inputs, strict=True))
        self._mode = mode_of(self._placeholders)
        self._order = {node: i for i, node in enumerate(step.module.graph.nodes)}
        self._updated = {port.name for port in step.outputs if port.role is Role.BUFFER}
        self._random = self._random_nodes()
        inputs = {port.name: node for node, port in self._ports.items() if port.role is Role.BATCH}
        self.sizes = {symbol: inputs[name] for symbol, (name, _) in symbols_of(step).items()}

    def _random_nodes(self) -> set[Node]:
        """Return the free nodes from which random numbers are computed: a stage draws them once."""
        random: set[Node] = set()
        for node in self._items.free:
            port = self._ports.get(node)
            if (port is not None and port.role is Role.SEED) or any(
                s in random for s in node.all_input_nodes
            ):
                random.add(node)
        return random

    def run(self) -> Stages:
        symbols = symbols_of(self._step)
        up = [self._sent_up(boundary) for boundary in range(self._count - 1)]
        down = [self._sent_down(boundary) for boundary in range(self._count - 1)]
        parts: dict[tuple[int, Part], StepGraph] = {}
        for stage in range(self._count):
            above = down[stage] if stage < self._count - 1 else []
            below = down[stage - 1] if stage else []
            parts |= self._parts(stage, up[stage] if stage < self._count - 1 else [], below, above)

        def values(nodes: Iterable[Node]) -> tuple[Value, ...]:
            return tuple(
                Value(
                    n.name,
                    str(n.meta["val"].dtype).removeprefix("torch."),
                    shape_text(n.meta["val"].shape, symbols, n.name),
                )
                for n in nodes
            )

        inputs = {
            port.name: node.meta["val"].shape
            for node, port in self._ports.items()
            if port.role is Role.BATCH
        }
        example = {symbol: number(inputs[name][at]) for symbol, (name, at) in symbols.items()}
        return Stages(parts, tuple(map(values, up)), tuple(map(values, down)), symbols, example)

    # Values that are sent

    def _sent_up(self, boundary: int) -> list[Node]:
        """Return the forward values from below a boundary that are needed above it."""
        return [
            item.node
            for item in self._items.all
            if item.output is None and not item.backward and self._stage[item] <= boundary
            if any(self._stage[user] > boundary for user in item.users)
        ]

    def _sent_down(self, boundary: int) -> list[Node]:
        """Return the values from above a boundary that backward needs below it."""
        return [
            item.node
            for item in self._items.all
            if item.output is None and self._stage[item] > boundary
            if any(user.backward and self._stage[user] <= boundary for user in item.users)
        ]

    # Graphs

    def _parts(
        self, stage: int, up: Sequence[Node], below: Sequence[Node], above: Sequence[Node]
    ) -> dict[tuple[int, Part], StepGraph]:
        own = [item for item in self._items.all if self._stage[item] == stage]
        early = [item for item in own if not item.backward]
        late = [item for item in own if item.backward]
        backward, for_backward = self._backward(stage, late, below)
        computed = {item.node for item in early if item.output is None}
        for_backward += [n for n in below if n in computed and n not in for_backward]
        parts = {(stage, Part.FORWARD): self._forward(stage, early, up, for_backward)}
        parts |= {(stage, part): graph for part, graph in backward.items()}
        return parts

    def _backward(
        self, stage: int, items: Sequence[Item], below: Sequence[Node]
    ) -> tuple[dict[Part, StepGraph], list[Node]]:
        """Return the graphs of a stage's backward, and the values of the stage's forward that they
        read.
        """
        nodes = [item.node for item in items if item.output is None]
        gradients: dict[Port, list[Node]] = {}
        for item in items:
            if item.output is not None:
                gradients.setdefault(self._step.outputs[item.output], []).append(item.node)
        sends = [node for node in below if node in set(nodes)]
        if not nodes and not gradients:
            return {}, []
        whole = _Slice(self, nodes, stage, late=True)
        parts = {Part.BACKWARD: whole.finish(self._ports_of(sends, Role.COTANGENT), gradients)}
        first = _nodes_needed(nodes, sends)
        rest = [node for node in nodes if node not in first]
        crossing = [
            n
            for n in nodes
            if n in first
            and (any(u in set(rest) for u in n.users) or any(n in g for g in gradients.values()))
        ]
        if first:
            half = _Slice(self, [n for n in nodes if n in first], stage, late=True)
            ports = self._ports_of(sends, Role.COTANGENT) | self._ports_of(
                [n for n in crossing if n not in sends], Role.SAVED
            )
            parts[Part.INPUT] = half.finish(ports, {})
        other = _Slice(self, rest, stage, late=True)
        parts[Part.WEIGHT] = other.finish({}, gradients)
        return parts, [n for n in whole.received if self._is_of_forward(n, stage)]

    def _forward(
        self, stage: int, items: Sequence[Item], up: Sequence[Node], for_backward: Sequence[Node]
    ) -> StepGraph:
        nodes = [item.node for item in items if item.output is None]
        outputs: dict[Port, list[Node]] = {
            self._step.outputs[item.output]: [item.node]
            for item in items
            if item.output is not None
        }
        forward = _Slice(self, nodes, stage, late=False)
        own = set(nodes)
        ports = self._ports_of([n for n in up if n in own], Role.ACTIVATION)
        ports |= self._ports_of([n for n in for_backward if n not in up], Role.SAVED)
        read = {*forward.ports, *(self._ports[n] for n in for_backward if n in self._ports)}
        for node, port in zip(self._results, self._step.outputs, strict=True):
            # Every stage that reads such a buffer (a counter, say) updates its own copy.
            if (
                port.role is Role.BUFFER
                and port not in outputs
                and node in self._items.free
                and (port in read or stage == 0)
            ):
                outputs[port] = [node]
        return forward.finish(ports, outputs)

    def _ports_of(self, nodes: Iterable[Node], role: Role) -> dict[Port, list[Node]]:
        return {Port(role, node.name): [node] for node in nodes}

    def _is_of_forward(self, node: Node, stage: int) -> bool:
        """Return True if a value that backward reads comes from the stage's own forward, so not a
        cotangent or a value that was sent to it.
        """
        item = self._items.of.get(node)
        return item is None or (not item.backward and self._stage[item] == stage)

    def role_of(self, node: Node, stage: int, late: bool) -> Role | None:
        """Return the role in which a slice receives a node that it does not compute itself; None
        for a node that it computes.
        """
        port = self._ports.get(node)
        item = self._items.of.get(node)
        if item is not None:
            if item.backward or (late and self._stage[item] > stage):
                return Role.COTANGENT if self._stage[item] > stage else Role.SAVED
            return Role.SAVED if late else Role.ACTIVATION
        if late and port is not None and port.role is Role.BUFFER and port.name in self._updated:
            return Role.SAVED  # forward has replaced it
        if (
            late
            and node in self._random
            and port is None
            and isinstance(node.meta["val"], torch.Tensor)
        ):
            return Role.SAVED
        return None

    def port_of(self, node: Node) -> Port:
        return self._ports[node]

    @property
    def module(self) -> GraphModule:
        return self._step.module

    @property
    def mode(self) -> object:
        return self._mode

    def position(self, node: Node) -> int:
        return self._order[node]


def _nodes_needed(nodes: Sequence[Node], targets: Sequence[Node]) -> set[Node]:
    """Return the nodes that the wanted ones are computed from, and the users of those whose results
    cannot be saved.
    """
    among, needed, stack = set(nodes), set[Node](), list(targets)
    while stack:
        node = stack.pop()
        if node in among and node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
            stack += [] if is_sendable(node) else list(node.users)
    return needed


class _Slice:
    """A graph of some nodes. Other values that they need come in through ports, except free or
    derived ones, which are computed in it.
    """

    def __init__(self, cutter: _Cutter, nodes: Sequence[Node], stage: int, *, late: bool) -> None:
        self._cutter, self._stage, self._late = cutter, stage, late
        self._graph = Graph()
        self._copied: dict[Node, Node] = {}
        self._own = set(nodes)
        self.ports: list[Port] = []
        self._inputs: dict[Node, Node] = {}
        self._last: Node | None = None
        self.received: list[Node] = []
        for node in nodes:
            self.get(node)

    def get(self, target: Node) -> Node:
        """Return the copy of a node, after copying everything that it needs in the order of the
        whole graph.
        """
        missing, stack = set[Node](), [target]
        while stack:
            node = stack.pop()
            if node not in self._copied and node not in missing:
                missing.add(node)
                if self._is_computed_here(node):
                    stack += node.all_input_nodes
        for node in sorted(missing, key=self._cutter.position):
            self._copied[node] = (
                self._copy(node) if self._is_computed_here(node) else self._input(node)
            )
        return self._copied[target]

    def _copy(self, node: Node) -> Node:
        if node.name != TANGENT:
            return self._graph.node_copy(node, lambda n: self._copied[n])
        copy = self._graph.create_node(
            node.op, node.target, node.args, node.kwargs, name=f"{TANGENT}_here"
        )  # all of this graph is backward
        copy.meta = dict(node.meta)
        return copy

    def _is_computed_here(self, node: Node) -> bool:
        return node.op != "placeholder" and (
            node in self._own or self._cutter.role_of(node, self._stage, self._late) is None
        )

    def _input(self, node: Node) -> Node:
        role = None if node in self._own else self._cutter.role_of(node, self._stage, self._late)
        port = self._cutter.port_of(node) if role is None else Port(role, node.name)
        first = next(iter(self._graph.nodes), None)
        with (
            self._graph.inserting_after(self._last)
            if self._last is not None
            else self._graph.inserting_before(first)
        ):
            placeholder = self._graph.placeholder(node.name)
        placeholder.meta = dict(node.meta)
        self._last = placeholder
        self.ports.append(port)
        self.received += [node] if role is not None else []
        return placeholder

    def _add_size_inputs(self) -> None:
        """Add the batch inputs that determine sizes which no other input has as one of its own."""
        shapes = [node.meta["val"].shape for node in self._graph.nodes if node.op == "placeholder"]
        expressions = {
            size.node.expr for shape in shapes for size in shape if isinstance(size, SymInt)
        }
        symbols = {str(symbol) for expression in expressions for symbol in expression.free_symbols}
        for symbol in sorted(symbols - {str(expression) for expression in expressions}):
            if symbol in self._cutter.sizes:
                self.get(self._cutter.sizes[symbol])

    def finish(self, *outputs: Mapping[Port, Sequence[Node]]) -> StepGraph:
        """Return the graph with these outputs, each the sum of some nodes."""
        ports = [port for some in outputs for port in some]
        results: list[Node] = []
        for some in outputs:
            for nodes in some.values():
                total = self.get(nodes[0])
                for node in nodes[1:]:
                    total = append(
                        self._graph, self._cutter.mode, aten.add.Tensor, total, self.get(node)
                    )
                results.append(total)
        self._add_size_inputs()
        output = self._graph.output(tuple(results))
        output.meta["val"] = tuple(r.meta["val"] for r in results)
        module = LazyGraphModule(self._cutter.module, self._graph)
        return StepGraph(module, tuple(self.ports), tuple(ports))
