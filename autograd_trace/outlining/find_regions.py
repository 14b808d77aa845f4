"""Find the regions of a graph that are the same operators on different values.

A region is a set of occurrences. Occurrence k has a node for each position, and the nodes of one
position are the same operator, with the same arguments, that reads the same positions of its own
occurrence, and from outside values of the same kind. So one body, with the values from outside as
operands, computes all occurrences. No value that depends on an occurrence, and is computed outside
of it, is read by it: an occurrence can be one call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Graph, Node

from trainload.autograd_trace.graphs import TANGENT
from trainload.autograd_trace.outlining.repeats import Repeat, find_repeats
from trainload.autograd_trace.outlining.signatures import (
    can_be_outlined,
    numbers_of,
    operands_of,
    signature,
)
from trainload.capture.operators import base_of

_LEAST_NODES = 12
"""Smaller regions stay as they are."""
_SYMBOLIC_SIZE = 64
"""Elements that a symbolic size counts for when bytes are compared."""


@dataclass(frozen=True, slots=True)
class Region:
    """Occurrences of the same operators, in graph order.

    Law: `occurrences[k][j]` is the node of position j in occurrence k; there are at least two
    occurrences.
    """

    occurrences: tuple[tuple[Node, ...], ...]


def find_regions(graph: Graph) -> list[Region]:
    """Return disjoint regions of a flat graph, those of the forward part first."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    tangent = next((index for node, index in order.items() if node.name == TANGENT), len(order))
    nodes = [node for node in order if can_be_outlined(node)]
    parts = (
        [node for node in nodes if order[node] < tangent],
        [node for node in nodes if order[node] >= tangent],
    )
    return [region for part in parts for region in _regions_of(part, order)]


def _regions_of(nodes: Sequence[Node], order: dict[Node, int]) -> list[Region]:
    numbers: dict[Hashable, int] = {}
    items = [numbers.setdefault(signature(node), len(numbers)) for node in nodes]
    regions: list[Region] = []
    for repeat in find_repeats(items):
        shift = _best_shift(nodes, repeat)
        begin = repeat.start + shift
        windows = [
            nodes[begin + k * repeat.period : begin + (k + 1) * repeat.period]
            for k in range(repeat.count)
        ]
        regions += _verified(windows, order)
    return regions


def _best_shift(nodes: Sequence[Node], repeat: Repeat) -> int:
    """Return the shift of the occurrences at which fewest bytes go from one to the next."""
    begin = repeat.start
    end = begin + repeat.period + repeat.matches
    place = {node: index for index, node in enumerate(nodes[begin:end])}
    last_use: dict[Node, int] = {}
    for node, index in place.items():
        for operand in operands_of(node):
            last_use[base_of(operand)] = index
    crossing = np.zeros(end - begin + 1)
    for source, last in last_use.items():
        if source in place:
            # bytes of a value cross every cut after it, up to its last use
            crossing[place[source] + 1 : last + 1] += _bytes(source)
    cuts = [
        [shift + k * repeat.period for k in range(1, repeat.count)]
        for shift in range(repeat.slack + 1)
    ]
    return int(np.argmin([crossing[each].sum() for each in cuts]))


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    total = 0
    for each in values:
        if isinstance(each, Tensor):
            size = each.element_size()
            lengths: list[Any] = list(each.shape)  # ints, and SymInts
            for length in lengths:
                size *= length if isinstance(length, int) else _SYMBOLIC_SIZE
            total += size
    return total


def _verified(windows: Sequence[Sequence[Node]], order: dict[Node, int]) -> list[Region]:
    """Return the regions of windows whose nodes have equal signatures.

    Positions at which the occurrences differ stay outside, and a window is split where a value that
    is computed outside depends on its first part and is read by its second.
    """
    places = [{node: j for j, node in enumerate(window)} for window in windows]
    outside = {j for j in range(len(windows[0])) if not _is_same(windows, places, j)}
    splits: set[int] = set()
    while True:
        segments = _segments(len(windows[0]), outside, splits)
        odd = _with_results_outside(windows, segments)
        if odd:
            outside |= odd
            continue
        added = _needed_splits(windows, segments, order) - splits
        if not added:
            break
        splits |= added
    return [
        Region(tuple(tuple(window[j] for j in segment) for window in windows))
        for segment in segments
        if len(segment) >= _LEAST_NODES
    ]


def _is_same(
    windows: Sequence[Sequence[Node]], places: Sequence[dict[Node, int]], position: int
) -> bool:
    """Return True if the nodes of a position have equal numbers as arguments, and read the same
    positions of their occurrences.
    """
    nodes = [window[position] for window in windows]
    inner = {
        (numbers_of(node), tuple(place.get(operand) for operand in operands_of(node)))
        for node, place in zip(nodes, places, strict=True)
    }
    return len(inner) == 1


def _segments(length: int, outside: set[int], splits: set[int]) -> list[list[int]]:
    """Return the positions of each part between two splits, without those that stay outside."""
    bounds = sorted({0, length} | splits)
    return [
        [j for j in range(begin, end) if j not in outside]
        for begin, end in itertools.pairwise(bounds)
    ]


def _with_results_outside(
    windows: Sequence[Sequence[Node]], segments: Sequence[Sequence[int]]
) -> set[int]:
    """Return positions of nodes with several results, or of one of their results, that another
    segment or the outside would have to take apart or receives whole.
    """
    odd: set[int] = set()
    for segment in segments:
        for window in windows:
            inside = {window[j] for j in segment}
            for j in segment:
                node = window[j]
                source: Any = node.args[0] if node.target is operator.getitem else node
                several = not isinstance(node.meta["val"], Tensor)
                if (source is not node and source not in inside) or (
                    several and not inside.issuperset(node.users)
                ):
                    odd.add(j)
    return odd


def _needed_splits(
    windows: Sequence[Sequence[Node]], segments: Sequence[Sequence[int]], order: dict[Node, int]
) -> set[int]:
    """Return the first position, in each segment, that reads a value from outside that depends on
    the segment.
    """
    splits: set[int] = set()
    in_order = list(order)
    for segment in segments:
        if not segment:
            continue
        for window in windows:
            inside = {window[j]: j for j in segment}
            dependent: set[Node] = set()
            for node in in_order[order[window[segment[0]]] : order[window[segment[-1]]] + 1]:
                sources = node.all_input_nodes
                if node in inside:
                    if any(source in dependent for source in sources):
                        splits.add(inside[node])
                        break
                elif any(source in dependent or source in inside for source in sources):
                    dependent.add(node)
    return splits
