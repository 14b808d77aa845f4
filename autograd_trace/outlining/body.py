"""Make one graph that computes every occurrence of a region."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.outlining.find_regions import Region
from trainload.autograd_trace.outlining.masks import is_mask, pack, packed_value, unpack
from trainload.autograd_trace.outlining.signatures import may_alias, operands_of


@dataclass(frozen=True, slots=True)
class Body:
    """Graph of a region, and how the outer graph calls it.

    Attributes:
        module: the graph; its inputs are the operands, its output is a tuple of the results.
        operands: `operands[i][k]` is the node that occurrence k passes as input i.
        packed: True for each operand that is passed as a packed mask.
        results: positions of the nodes that are returned, in order. Masks are returned packed.
        views: positions of the nodes that the outer graph computes again, in order, since no result
            may share memory with another or with an operand.
    """

    module: GraphModule
    operands: tuple[tuple[Node, ...], ...]
    packed: tuple[bool, ...]
    results: tuple[int, ...]
    views: tuple[int, ...]


def make_body(region: Region, masks: Set[Node]) -> Body:
    """Return the body of a region.

    Args:
        region: the region.
        masks: bool tensors that regions return packed.
    """
    places = [{node: j for j, node in enumerate(nodes)} for nodes in region.occurrences]
    first = region.occurrences[0]
    operands = tuple(dict.fromkeys(_outer_operands(region)))
    packed = tuple(masks >= set(operand) for operand in operands)
    results, views = _returned(region)
    graph = Graph()
    inputs: dict[tuple[Node, ...], Node] = {}
    for number, (operand, is_packed) in enumerate(zip(operands, packed, strict=True)):
        node = graph.placeholder(f"operand_{number}")
        value = operand[0].meta["val"]
        node.meta["val"] = packed_value(value) if is_packed else value
        inputs[operand] = node
    for operand, is_packed in zip(operands, packed, strict=True):
        if is_packed:
            inputs[operand] = unpack(graph, inputs[operand])
    copied: list[Node] = []
    for nodes in zip(*region.occurrences, strict=True):
        sources = iter(_aligned_operands(nodes))

        def source(operand: Node, sources: Iterator[tuple[Node, ...]] = sources) -> Node:
            aligned = next(sources)
            place = places[0].get(operand)
            return inputs[aligned] if place is None else copied[place]

        node = graph.create_node(
            "call_function",
            nodes[0].target,
            torch.fx.map_arg(nodes[0].args, source),
            torch.fx.map_arg(nodes[0].kwargs, source),
        )
        node.meta["val"] = nodes[0].meta["val"]
        copied.append(node)
    returned = [pack(graph, copied[j]) if is_mask(first[j]) else copied[j] for j in results]
    output = graph.output(tuple(returned))
    output.meta["val"] = tuple(node.meta["val"] for node in returned)
    graph.eliminate_dead_code()
    graph.lint()
    return Body(GraphModule(torch.nn.Module(), graph), operands, packed, results, views)


def _aligned_operands(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """Yield what the nodes of one position read, argument by argument."""
    return zip(*(operands_of(node) for node in nodes), strict=True)


def _outer_operands(region: Region) -> Iterator[tuple[Node, ...]]:
    inside = set(region.occurrences[0])
    for nodes in zip(*region.occurrences, strict=True):
        for aligned in _aligned_operands(nodes):
            if aligned[0] not in inside:
                yield aligned


def returned_masks(region: Region) -> set[Node]:
    """Return the bool tensors that the body of a region returns, of all occurrences."""
    positions, _ = _returned(region)
    return {nodes[j] for nodes in region.occurrences for j in positions if is_mask(nodes[j])}


def _returned(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `Body.results` and `Body.views`."""
    first = region.occurrences[0]
    place = {node: j for j, node in enumerate(first)}
    needed = [j for j in range(len(first)) if _is_read_outside(region, j)]
    results: set[int] = set()
    views: set[int] = set()
    while needed:
        position = needed.pop()
        node = first[position]
        if position in results | views:
            continue
        if may_alias(node):
            views.add(position)
            needed += [place[each] for each in operands_of(node) if each in place]
        else:
            results.add(position)
    return tuple(sorted(results)), tuple(sorted(views))


def _is_read_outside(region: Region, position: int) -> bool:
    """Return True if the value of a position is read outside of its occurrence, in any of them."""
    return any(not set(nodes).issuperset(nodes[position].users) for nodes in region.occurrences)
