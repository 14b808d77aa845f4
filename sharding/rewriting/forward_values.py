"""The values of a step graph's forward part, and which of them are kept for backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.liveness import Storages


@dataclass(frozen=True, slots=True)
class Span:
    """A storage of forward.

    Attributes:
        first: index, in `Forward.nodes`, of the node that allocates it.
        last: index of the last node that uses it in forward.
        bytes: its size.
        is_kept: True if backward uses it.
    """

    first: int
    last: int
    bytes: int
    is_kept: bool


class Forward:
    """The part of a graph's forward that depends on more than parameters.

    What is computed from parameters only, backward computes again under every plan.

    Attributes:
        nodes: its nodes, in order.
        backward: the nodes from the beginning of backward on.
        storages: storages of the whole graph.
        spans: index of a storage that `nodes` allocate -> its use.
    """

    def __init__(self, step: StepGraph) -> None:
        nodes = list(step.module.graph.nodes)
        begin = next(i for i, node in enumerate(nodes) if node.name == TANGENT)
        self.storages = Storages(step.module)
        weights = {
            node
            for node, port in zip(ends(step.module)[0], step.inputs, strict=True)
            if port.role is Role.PARAMETER
        }
        for node in nodes[:begin]:
            if (
                node.op == "call_function"
                and node.all_input_nodes
                and weights.issuperset(node.all_input_nodes)
            ):
                weights.add(node)
        self.nodes = [
            n
            for n in nodes[:begin]
            if n.op == "call_function" and n not in weights and self.storages_of(n)
        ]
        self.backward = nodes[begin:]
        self.spans = self._find_spans()

    def _find_spans(self) -> dict[int, Span]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for storage in self.storages.allocated.get(node, ()):
                first[storage] = last[storage] = index
            for source in node.all_input_nodes:
                last |= {s: index for s in self.storages_of(source) if s in first}
        kept = {
            s
            for node in self.backward
            for source in node.all_input_nodes
            for s in self.storages_of(source)
        }
        return {s: Span(first[s], last[s], self.storages.bytes[s], s in kept) for s in first}

    def storages_of(self, node: Node) -> list[int]:
        """Return the storages of a node's tensors."""
        return [storage for storage in self.storages.of.get(node, ()) if storage is not None]


def has_backward(step: StepGraph) -> bool:
    """Return True if a step graph has a backward part."""
    return any(node.name == TANGENT for node in step.module.graph.nodes)
