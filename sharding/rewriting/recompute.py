"""Recomputation that a plan asks for, in addition to the model's own checkpoints.

Forward is divided into segments at places where few bytes cross, and each segment is recomputed
when backward reaches it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.graphs import CHUNK, TANGENT, Role, StepGraph
from trainload.autograd_trace.recompute.rematerialisation import Region, Regions, recompute
from trainload.capture.operators import is_collective
from trainload.sharding.analysis.graph_nodes import LazyGraphModule, ends
from trainload.sharding.analysis.liveness import Storages
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.plans.strategies import Recompute

_VARYING = (Role.BATCH, Role.SEED, Role.STEP, Role.ROW)
_PARTS = 24
"""Number of segment sizes that are tried."""


def recomputed(step: StepGraph, how: Recompute, where: str = "train") -> StepGraph:
    """Return the same step graph with fewer values kept from forward to backward. No value changes.

    Args:
        step: step graph of one rank of the tensor axis.
        how: "job": only as the model's checkpoints say. "full": of each segment, keep only values
            that later segments use. "selective": keep also results of matrix products,
            convolutions, attention and collectives.
        where: name of the graph.
    """
    nodes = list(step.module.graph.nodes)
    begin = next((i for i, n in enumerate(nodes) if n.name == TANGENT), None)
    if how == "job" or begin is None:
        return step
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in nodes:
        copied[node] = graph.node_copy(node, lambda source: copied[source])
    module = LazyGraphModule(step.module, graph)
    placeholders, _ = ends(module)
    forward = _Forward(
        module,
        begin,
        {n for n, p in zip(placeholders, step.inputs, strict=True) if p.role is Role.PARAMETER},
    )
    regions = forward.regions(keep_products=how == "selective")
    varying = [n for n, p in zip(placeholders, step.inputs, strict=True) if p.role in _VARYING]
    recompute(module, regions, varying, where)
    return StepGraph(module, step.inputs, step.outputs)


@dataclass(frozen=True, slots=True)
class _Span:
    """A storage of forward: the first and the last place at which forward uses it, its bytes, and
    True if backward uses it.
    """

    first: int
    last: int
    bytes: int
    saved: bool


class _Forward:
    """The part of a graph's forward that can be recomputed."""

    def __init__(self, module: GraphModule, begin: int, parameters: set[Node]) -> None:
        nodes = list(module.graph.nodes)
        self._storages = Storages(module)
        self._weights = set(parameters)
        """Nodes computed from parameters only: a plan recomputes these for backward anyway."""
        for node in nodes[:begin]:
            if (
                node.op == "call_function"
                and node.all_input_nodes
                and self._weights.issuperset(node.all_input_nodes)
            ):
                self._weights.add(node)
        self._nodes = [
            n
            for n in nodes[:begin]
            if n.op == "call_function" and n not in self._weights and self._storages_of(n)
        ]
        self._backward = nodes[begin:]
        self._spans = self._find_spans()

    def _find_spans(self) -> dict[int, _Span]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, node in enumerate(self._nodes):
            for storage in self._storages.allocated.get(node, ()):
                first[storage] = last[storage] = index
            for source in node.all_input_nodes:
                last |= {s: index for s in self._storages_of(source) if s in first}
        saved = {
            s
            for node in self._backward
            for source in node.all_input_nodes
            for s in self._storages_of(source)
        }
        return {s: _Span(first[s], last[s], self._storages.bytes[s], s in saved) for s in first}

    def _storages_of(self, node: Node) -> list[int]:
        return [storage for storage in self._storages.of.get(node, ()) if storage is not None]

    def regions(self, *, keep_products: bool) -> dict[Node, Regions]:
        """Return node -> the segment that it is recomputed with, for forward nodes that are not
        kept and for backward nodes that use them.
        """
        cuts = self._cuts()
        number = {node: sum(cut <= index for cut in cuts) for index, node in enumerate(self._nodes)}
        crossing = {
            s
            for s, span in self._spans.items()
            if any(span.first < cut <= span.last for cut in cuts)
        }
        saved = {
            node
            for node in self._nodes
            if CHUNK in node.meta or crossing.intersection(self._storages_of(node))
        }
        if keep_products:
            saved |= {
                node
                for node in self._nodes
                if _is_expensive(
                    node.all_input_nodes[0] if node.target is operator.getitem else node
                )
            }
        last = len(cuts)  # backward begins with the last segment, whose values still exist
        forward: dict[Node, Regions] = {
            node: (Region(number[node]),)
            for node in self._nodes
            if node not in saved and number[node] < last
        }
        using = (
            (node, [forward[source] for source in node.all_input_nodes if source in forward])
            for node in self._backward
        )
        return forward | {node: regions[0] for node, regions in using if regions}

    def _cuts(self) -> list[int]:
        """Return the nodes before which forward is cut, such that the kept values plus the largest
        segment are smallest.
        """
        crossing = [0] * (len(self._nodes) + 1)
        saved = [0] * (len(self._nodes) + 1)
        for span in self._spans.values():
            crossing[span.first + 1] += span.bytes
            crossing[span.last + 1] -= span.bytes
            saved[span.first] += span.bytes if span.saved else 0
        for index in range(1, len(crossing)):
            crossing[index] += crossing[index - 1]
        whole = sum(saved)
        tried = [_divide(crossing, saved, whole / parts) for parts in _sizes(len(self._nodes))]
        cuts = min(tried, key=lambda cuts: _cost(cuts, crossing, saved))
        longest = max(_segment_bytes(cuts, saved))
        while cuts and sum(saved[cuts[-1] :]) < longest / 2:
            # what follows the last cut is not repeated, so it should be a substantial segment
            cuts.pop()
        return cuts


def _sizes(count: int) -> list[int]:
    """Return the numbers of segments to try."""
    return sorted({max(1, round(count ** (index / _PARTS))) for index in range(_PARTS + 1)})


def _divide(crossing: list[int], saved: list[int], size: float) -> list[int]:
    """Return cuts of segments that save about `size` bytes each: where the fewest bytes cross in
    the second half of each.
    """
    cuts: list[int] = []
    inside = 0.0
    best: int | None = None
    for index in range(1, len(saved) - 1):
        inside += saved[index - 1]
        if inside >= size / 2 and (best is None or crossing[index] <= crossing[best]):
            best = index
        if inside >= size and best is not None:
            cuts.append(best)
            inside = float(sum(saved[best:index]))
            best = None
    return cuts


def _cost(cuts: list[int], crossing: list[int], saved: list[int]) -> float:
    return sum(crossing[cut] for cut in cuts) + max(_segment_bytes(cuts, saved))


def _segment_bytes(cuts: list[int], saved: list[int]) -> list[int]:
    """Return the bytes that each segment saves."""
    return [sum(saved[a:b]) for a, b in pairwise([0, *cuts, len(saved)])]


def _is_expensive(node: Node) -> bool:
    return flops(node) > 0 or is_collective(node)
