"""Activation checkpointing: values that the model's checkpoints compute in forward are recomputed
in backward instead of being kept.

While a program is interpreted under AOT autograd's tracer, `marking` records in each new node which
checkpoints it is in; torch copies this from an operator's forward nodes to its backward nodes.
`recompute` then copies forward nodes into the backward part of the flat graph, as late as they are
needed there, and makes backward use the copies.

The copies follow eager's torch.utils.checkpoint. A checkpoint's inputs are kept, and so are its
results that an operator outside of it has saved, and values that a policy keeps. A node inside
nested checkpoints is recomputed once for each: while the outer one is recomputed, the inner one
keeps nothing, and is then recomputed itself.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.traceback import get_current_meta

from trainload.autograd_trace.graph_calls import remove_dead_code
from trainload.autograd_trace.graphs import TANGENT
from trainload.capture.watching.selective import kept_operators
from trainload.core.errors import CaptureError

RECOMPUTES = "trainload_recomputes"
"""Metadata key of a node that recomputes a forward value: that forward node's name."""
REPEATED = "trainload_repeated"
"""Metadata key of a forward node that is recomputed and depends on the batch or on random numbers,
not on weights alone.
"""
_REGIONS = "trainload_checkpoints"


class Region(NamedTuple):
    """A checkpoint of one graph: its number, and its policy as text, in the format of
    `capture/watching/selective.py`.
    """

    number: int
    keeps: str = ""


Regions = tuple[Region, ...]
"""The checkpoints that a node is in, outermost first."""


@contextmanager
def marking(regions: Regions) -> Iterator[None]:
    """Mark nodes that are traced inside as being in these checkpoints.

    Requires torch.fx.traceback.preserve_node_meta around the whole trace.
    """
    meta = get_current_meta()
    before = meta.get("custom")
    # a new dict: torch's `annotate` writes into that of the interpreted node
    meta["custom"] = {**(before or {}), _REGIONS: regions}
    try:
        yield
    finally:
        if before is None:
            del meta["custom"]
        else:
            meta["custom"] = before


def regions_of(node: Node) -> Regions:
    """Return the checkpoints that a traced node is in; for a backward node, those of the operator
    that it differentiates.
    """
    regions: Regions = node.meta.get("custom", {}).get(_REGIONS, ())
    return regions


def recompute(
    module: GraphModule, regions: Mapping[Node, Regions], varying: Collection[Node], graph: str
) -> None:
    """Make the backward part of a flat functional graph recompute values inside checkpoints. In
    place; no value changes.

    Args:
        module: a graph whose backward part begins at the node named TANGENT. Nothing in it draws
            from a generator, so a node may be computed twice.
        regions: node -> the checkpoints that it is in; missing nodes are in none.
        varying: the placeholders that change in every step: the batch, and the inputs of random
            numbers.
        graph: name of the graph, for errors.

    Raises:
        CaptureError: a policy's answers do not fit the graph.
    """
    nodes = list(module.graph.nodes)
    begin = next((i for i, n in enumerate(nodes) if n.name == TANGENT), None)
    if begin is None:
        return
    inside = {
        n: checkpoints
        for n in nodes[:begin]
        if (checkpoints := regions.get(n, ())) and _makes_tensors(n)
    }
    copies = _Copies(module.graph, inside, _find_keepers(inside, graph))
    for node in nodes[begin:]:
        if node.op == "call_function":
            for source in [s for s in node.all_input_nodes if s in inside]:
                node.replace_input_with(
                    source, copies.of(source, regions.get(node, ()), before=node)
                )
    varied, copied = set(varying), copies.originals()
    for node in nodes[:begin]:
        if any(s in varied for s in node.all_input_nodes):
            varied.add(node)
            if node in copied:
                node.meta[REPEATED] = True
    remove_dead_code(module.graph)
    module.graph.lint()
    module.recompile()


def _makes_tensors(node: Node) -> bool:
    """Return True if a node's value holds tensors. Sizes need no memory, and are kept."""
    value = node.meta.get("val")
    return node.op == "call_function" and any(
        isinstance(v, Tensor) for v in (value if isinstance(value, tuple | list) else (value,))
    )


def _find_keepers(inside: Mapping[Node, Regions], graph: str) -> dict[Node, set[Region]]:
    """Return node -> the checkpoints whose policies keep its value."""
    calls: dict[Region, dict[str, list[Node]]] = {}
    for node, regions in inside.items():
        for region in regions:
            if region.keeps:
                calls.setdefault(region, {}).setdefault(str(node.target), []).append(node)
    keepers: dict[Node, set[Region]] = {}
    for region, calls_by_name in calls.items():
        for name, answers in kept_operators(region.keeps).items():
            matching = calls_by_name.get(name, [])
            if len(answers) == 1:
                answers *= len(matching)
            elif len(answers) != len(matching):
                raise CaptureError(
                    f"a selective checkpoint's policy treats the calls of {name} differently, but"
                    " the derived graph has another number",
                    where=f"graph {graph}",
                    expected=f"{len(answers)} calls in the checkpoint",
                    got=f"{len(matching)}",
                    hint="Make the policy depend on the operator only.",
                )
            for node, answer in zip(matching, answers, strict=True):
                if answer == "1":
                    keepers.setdefault(node, set()).add(region)
    for node in inside:
        if node.target is operator.getitem and node.all_input_nodes[0] in keepers:
            keepers[node] = keepers[node.all_input_nodes[0]]
    return keepers


class _Copies:
    """Copies of forward nodes in the backward part: one of each node for each recomputed checkpoint
    around it.
    """

    def __init__(
        self, graph: Graph, regions: Mapping[Node, Regions], keepers: Mapping[Node, set[Region]]
    ) -> None:
        self._graph = graph
        self._regions = regions
        self._keepers = keepers
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._copies: dict[tuple[Node, int], Node] = {}

    def of(self, node: Node, inside: Regions, before: Node) -> Node:
        """Return the node that replaces a forward node while the checkpoints `inside` are
        recomputed, or the node itself if it is in none of them.

        Missing copies are made, before the node `before`, in the order of forward.
        """
        depth = self._depth(node, inside)
        pending = [(node, depth)] if depth else []
        missing: dict[tuple[Node, int], dict[Node, int]] = {}
        while pending:
            here = pending.pop()
            if here not in self._copies and here not in missing:
                around = self._regions[here[0]][: here[1]]
                missing[here] = {s: self._depth(s, around) for s in here[0].all_input_nodes}
                pending += [(s, d) for s, d in missing[here].items() if d]
        for here in sorted(missing, key=lambda pair: self._order[pair[0]]):
            depths = missing[here]
            with self._graph.inserting_before(before):
                copy = self._graph.node_copy(
                    here[0],
                    lambda n, depths=depths: self._copy_of(n, depths[n]),  # type: ignore[misc]  # a default
                )
            copy.meta = {**here[0].meta, "partitioner_tag": "is_backward", RECOMPUTES: here[0].name}
            self._copies[here] = copy
        return self._copy_of(node, depth)

    def originals(self) -> set[Node]:
        """Return the nodes that have copies."""
        return {node for node, _ in self._copies}

    def _depth(self, node: Node, inside: Regions) -> int:
        """Return the number of the checkpoints `inside` that a node is in, up to the innermost that
        does not keep its value.
        """
        own = self._regions.get(node, ())
        depth = next(
            (i for i, (a, b) in enumerate(zip(own, inside, strict=False)) if a != b),
            min(len(own), len(inside)),
        )
        while depth and own[depth - 1] in self._keepers.get(node, ()):
            depth -= 1
        return depth

    def _copy_of(self, node: Node, depth: int) -> Node:
        return self._copies[node, depth] if depth else node
