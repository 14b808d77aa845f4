"""Replace the repeated layers of a flat graph by calls of one body, so that a compiler's work does
not grow with depth.

    outlined = outline(module)
    outlined.module   # computes the same, bit for bit
    outlined.regions  # (OutlinedRegion(nodes=187, calls=6), ...)

Layers are recognised by structure alone (repeats.py, find_regions.py), since a package does not say
where a graph's operators come from. Their calls then receive what views are of (views.py), and
receive and return slices of a plan's flat tensors (fold.py). The result is compared with the
original, expression by expression (equality.py), so a mistake here is an error and never another
result.
"""

from __future__ import annotations

import heapq
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.outlining.body import make_body, returned_masks
from trainload.autograd_trace.outlining.equality import CALL, differing_output
from trainload.autograd_trace.outlining.find_regions import Region, find_regions
from trainload.autograd_trace.outlining.fold import fold
from trainload.autograd_trace.outlining.masks import is_mask, packed_value, unpack
from trainload.autograd_trace.outlining.signatures import is_size
from trainload.capture.operators import is_collective, is_overload


class NotOutlined(Exception):
    """A graph is left flat. The message says why."""


@dataclass(frozen=True, slots=True)
class OutlinedRegion:
    """Size of a region: operators of its body, and number of its calls."""

    nodes: int
    calls: int


@dataclass(frozen=True, slots=True)
class Outlined:
    """A graph with calls of regions, or the original graph if nothing in it repeats itself.

    Attributes:
        module: the graph; same inputs and outputs as the original.
        regions: its regions, in the order of their first calls' originals.
        nodes: operators of the graph and of the regions' bodies.
    """

    module: GraphModule
    regions: tuple[OutlinedRegion, ...]
    nodes: int


def outline(module: GraphModule) -> Outlined:
    """Replace repeated layers of a flat graph by calls of one body.

    Args:
        module: a flat graph whose nodes have `meta["val"]`. Nodes that compute the same symbolic
            size are merged in place; otherwise it is unchanged.

    Raises:
        NotOutlined: the graph writes in place, or the result would not be equal.

    Example:
        >>> outline(rank_graph.module).regions
        (OutlinedRegion(nodes=187, calls=6), OutlinedRegion(nodes=74, calls=6))
    """
    _merge_sizes(module.graph)
    regions = find_regions(module.graph)
    if not regions:
        return Outlined(module, (), _count(module))
    written = next((node for node in module.graph.nodes if _writes(node)), None)
    if written is not None:
        raise NotOutlined(f"{written.target} writes to its operand, so calls may not be reordered")
    outlined = _Outliner(module, regions).run()
    fold(outlined)
    differing = differing_output(module, outlined)
    if differing is not None:
        raise NotOutlined(f"output {differing} of the outlined graph would be another expression")
    sizes = (
        OutlinedRegion(len(region.occurrences[0]), len(region.occurrences)) for region in regions
    )
    return Outlined(outlined, tuple(sizes), _count(outlined))


def _writes(node: Node) -> bool:
    """Return True if an operator writes to an operand's memory, other than the wait for a
    collective, whose operand nothing else reads.
    """
    return is_overload(node.target) and node.target._schema.is_mutable and not is_collective(node)


def _count(module: GraphModule) -> int:
    """Return the number of operators in a graph and in the bodies of its regions."""
    bodies = [getattr(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")]
    graphs = [module.graph, *(b.graph for b in bodies if isinstance(b, GraphModule))]
    return sum(node.op == "call_function" for graph in graphs for node in graph.nodes)


def _merge_sizes(graph: Graph) -> None:
    """Keep one node for each symbolic size, so that layers read the same one."""
    first: dict[str, Node] = {}
    for node in list(graph.nodes):
        if is_size(node):
            earlier = first.setdefault(str(node.meta["val"]), node)
            if earlier is not node and node.op == "call_function":
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


_Unit = Node | tuple[int, int]
"""A node of the outer graph, or (region, occurrence)."""


class _Outliner:
    """Builds the outer graph of one module."""

    def __init__(self, module: GraphModule, regions: list[Region]) -> None:
        self._module = module
        self._regions = regions
        masks = set[Node]().union(*map(returned_masks, regions))
        self._bodies = [make_body(region, masks) for region in regions]
        self._names = [_free_name(module, number) for number in range(len(regions))]
        self._unit: dict[Node, _Unit] = {
            node: (number, k)
            for number, region in enumerate(regions)
            for k, occurrence in enumerate(region.occurrences)
            for node in occurrence
        }
        self._graph = Graph()
        self._copied: dict[Node, Node] = {}
        self._packed: dict[Node, Node] = {}  # masks, as regions return and receive them
        self._attributes: dict[int, Node] = {}

    def run(self) -> GraphModule:
        for unit in self._ordered():
            if isinstance(unit, Node):
                self._copied[unit] = self._graph.node_copy(unit, self._copied.__getitem__)
            else:
                self._call(*unit)
        self._graph.eliminate_dead_code()
        self._graph.lint()
        bodies: dict[str, Any] = {
            name: body.module for name, body in zip(self._names, self._bodies, strict=True)
        }
        others = {
            str(node.target): operator.attrgetter(str(node.target))(self._module)
            for node in self._module.graph.find_nodes(op="get_attr")
        }
        return GraphModule(others | bodies, self._graph)

    def _call(self, number: int, occurrence: int) -> None:
        """Append the call of a region, its results, and the views that are computed again."""
        body, nodes = self._bodies[number], self._regions[number].occurrences[occurrence]
        if number not in self._attributes:
            self._attributes[number] = self._graph.get_attr(self._names[number])
        operands = [
            (self._packed if is_packed else self._copied)[operand[occurrence]]
            for operand, is_packed in zip(body.operands, body.packed, strict=True)
        ]
        # torch caches what it traces by the identifier alone, which must be unique in the graph
        call = self._graph.call_function(
            CALL, (self._attributes[number], self._names[number], *operands)
        )
        values = [nodes[position].meta["val"] for position in body.results]
        for index, position in enumerate(body.results):
            result = self._graph.call_function(operator.getitem, (call, index))
            result.meta["val"] = values[index]
            if is_mask(nodes[position]):
                result.meta["val"] = values[index] = packed_value(values[index])
                self._packed[nodes[position]] = result
                result = unpack(self._graph, result)
            self._copied[nodes[position]] = result
        call.meta["val"] = tuple(values)
        for position in body.views:
            view = nodes[position]
            self._copied[view] = self._graph.node_copy(view, self._copied.__getitem__)

    def _ordered(self) -> list[_Unit]:
        """Return the units in an order in which each follows what it reads, and which is otherwise
        that of the original graph. A call takes the place of its last node, so that collectives
        that started between its nodes start before it; waits among them follow it.
        """
        units: dict[_Unit, None] = {}
        last: dict[_Unit, float] = {}
        sources: dict[_Unit, set[_Unit]] = {}
        order = list(self._module.graph.nodes)
        for index, node in enumerate(order):
            unit = self._unit.get(node, node)
            units[unit] = None
            last[unit] = index
            before = {self._unit.get(source, source) for source in node.all_input_nodes}
            sources.setdefault(unit, set()).update(before - {unit})
        self._postpone_waits(order, last)
        users: dict[_Unit, list[_Unit]] = {unit: [] for unit in units}
        for unit, before in sources.items():
            for source in before:
                users[source].append(unit)
        missing = {unit: len(before) for unit, before in sources.items()}
        place = {unit: number for number, unit in enumerate(units)}
        by_place = list(units)
        ready = [(last[unit], place[unit]) for unit in units if not missing[unit]]
        heapq.heapify(ready)
        ordered: list[_Unit] = []
        while ready:
            unit = by_place[heapq.heappop(ready)[1]]
            ordered.append(unit)
            for user in users[unit]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (last[user], place[user]))
        assert len(ordered) == len(units), "no value outside of a call both reads and feeds it"
        return ordered

    def _postpone_waits(self, order: list[Node], last: dict[_Unit, float]) -> None:
        """Move waits for collectives that are among a call's nodes to after the call."""
        end = -1.0
        for index, node in enumerate(order):
            unit = self._unit.get(node)
            if unit is not None:
                end = max(end, last[unit])
            elif _is_wait(node) and index < end:
                last[node] = end + 0.5


def _is_wait(node: Node) -> bool:
    return bool(node.target is torch.ops._c10d_functional.wait_tensor.default)


def _free_name(module: GraphModule, number: int) -> str:
    name = f"layer_{number}"
    while hasattr(module, name):
        name = f"_{name}"
    return name
