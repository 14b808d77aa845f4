"""Recomputation that a plan asks for, beside what the model's own checkpoints ask for: forward is divided where little crosses, and what
lies between two such places is computed again when backward comes to it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.autograd_trace.recompute.rematerialisation import Region, Regions, recompute
from trainload.capture.operators import is_collective
from trainload.sharding.analysis.graph_nodes import LazyGraphModule, ends
from trainload.sharding.analysis.liveness import Storages
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.plans.strategies import Recompute

_VARYING = (Role.BATCH, Role.SEED, Role.STEP, Role.ROW)
_PARTS = 24
"""How many sizes of a stretch are tried."""


def recomputed(step: StepGraph, how: Recompute, where: str = "train") -> StepGraph:
    """The same step graph with less kept from forward to backward. All values stay what they are.

    Args:
        step: a step graph, as one rank of the tensor axis has it.
        how: "job": as the model's checkpoints say, nothing beside. "full": of each stretch only what goes on to the next is kept.
            "selective": also what a matrix product, a convolution, attention or a collective has computed.
        where: the graph's name.
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
    forward = _Forward(module, begin, {n for n, p in zip(placeholders, step.inputs, strict=True) if p.role is Role.PARAMETER})
    regions = forward.regions(keep_products=how == "selective")
    varying = [n for n, p in zip(placeholders, step.inputs, strict=True) if p.role in _VARYING]
    recompute(module, regions, varying, where)
    return StepGraph(module, step.inputs, step.outputs)


@dataclass(frozen=True, slots=True)
class _Span:
    """A storage of forward: the first and the last place at which forward uses it, its bytes, and whether backward uses it."""

    first: int
    last: int
    bytes: int
    saved: bool


class _Forward:
    """The forward part of a graph, as far as it can be computed again."""

    def __init__(self, module: GraphModule, begin: int, parameters: set[Node]) -> None:
        nodes = list(module.graph.nodes)
        self._storages = Storages(module)
        self._weights = set(parameters)
        """What is computed of parameters alone: a plan makes it anew for backward as it is."""
        for node in nodes[:begin]:
            if node.op == "call_function" and node.all_input_nodes and self._weights.issuperset(node.all_input_nodes):
                self._weights.add(node)
        self._nodes = [n for n in nodes[:begin] if n.op == "call_function" and n not in self._weights and self._stored(n)]
        self._backward = nodes[begin:]
        self._spans = self._find_spans()

    def _find_spans(self) -> dict[int, _Span]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, node in enumerate(self._nodes):
            for storage in self._storages.made.get(node, ()):
                first[storage] = last[storage] = index
            for source in node.all_input_nodes:
                last |= {s: index for s in self._stored(source) if s in first}
        saved = {s for node in self._backward for source in node.all_input_nodes for s in self._stored(source)}
        return {s: _Span(first[s], last[s], self._storages.bytes[s], s in saved) for s in first}

    def _stored(self, node: Node) -> list[int]:
        return [storage for storage in self._storages.of.get(node, ()) if storage is not None]

    def regions(self, *, keep_products: bool) -> dict[Node, Regions]:
        """Node -> the stretch that it is computed again with: of forward what is not kept, of backward what uses such."""
        cuts = self._cuts()
        number = {node: sum(cut <= index for cut in cuts) for index, node in enumerate(self._nodes)}
        crossing = {s for s, span in self._spans.items() if any(span.first < cut <= span.last for cut in cuts)}
        kept = {node for node in self._nodes if crossing.intersection(self._stored(node))}
        if keep_products:
            kept |= {node for node in self._nodes if _is_dear(node.all_input_nodes[0] if node.target is operator.getitem else node)}
        last = len(cuts)  # backward begins with it: what it has is there already
        forward: dict[Node, Regions] = {node: (Region(number[node]),) for node in self._nodes if node not in kept and number[node] < last}
        using = ((node, [forward[source] for source in node.all_input_nodes if source in forward]) for node in self._backward)
        return forward | {node: used[0] for node, used in using if used}

    def _cuts(self) -> list[int]:
        """Before which nodes forward is cut: as many places as make what is kept, and the greatest stretch, smallest together."""
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
        longest = max(_stretches(cuts, saved))
        while cuts and sum(saved[cuts[-1] :]) < longest / 2:
            cuts.pop()  # what follows a last cut is not repeated: let that be a stretch worth the name
        return cuts


def _sizes(count: int) -> list[int]:
    """Into how many stretches forward is divided, in turn."""
    return sorted({max(1, round(count ** (index / _PARTS))) for index in range(_PARTS + 1)})


def _divide(crossing: list[int], saved: list[int], size: float) -> list[int]:
    """Cuts of stretches that save about `size` bytes each: where least crosses in the second half of each."""
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
    return sum(crossing[cut] for cut in cuts) + max(_stretches(cuts, saved))


def _stretches(cuts: list[int], saved: list[int]) -> list[int]:
    """What each stretch saves."""
    return [sum(saved[a:b]) for a, b in pairwise([0, *cuts, len(saved)])]


def _is_dear(node: Node) -> bool:
    return flops(node) > 0 or is_collective(node)
