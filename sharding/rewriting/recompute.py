"""Recomputation that a plan asks for, in addition to the model's own checkpoints.

Forward is divided into segments at places where few bytes cross, and each segment is recomputed
when backward reaches it.
"""

from __future__ import annotations

import operator
from itertools import pairwise

from torch.fx import Node

from trainload.autograd_trace.graphs import CHUNK, Role, StepGraph
from trainload.autograd_trace.recompute.rematerialisation import Region, Regions, recompute
from trainload.capture.operators import is_collective
from trainload.sharding.analysis.graph_nodes import copy_of, ends
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.plans.strategies import Recompute
from trainload.sharding.rewriting.forward_values import Forward, has_backward

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
    if how == "job" or not has_backward(step):
        return step
    step = copy_of(step)
    regions = _Segments(Forward(step)).regions(keep_products=how == "selective")
    placeholders, _ = ends(step.module)
    varying = [n for n, p in zip(placeholders, step.inputs, strict=True) if p.role in _VARYING]
    recompute(step.module, regions, varying, where)
    return step


class _Segments:
    """The segments of a graph's forward that can be recomputed."""

    def __init__(self, forward: Forward) -> None:
        self._nodes, self._backward, self._spans = forward.nodes, forward.backward, forward.spans
        self._storages_of = forward.storages_of

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
            saved[span.first] += span.bytes if span.is_kept else 0
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
