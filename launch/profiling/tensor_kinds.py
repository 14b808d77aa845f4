"""Origins of the values of a rank's graph: the kind of memory that each takes, and its module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import Role
from trainload.capture.operators import is_collective
from trainload.launching.debugging.node_origins import module_of
from trainload.launching.node.built_graphs import BuiltGraph
from trainload.launching.profiling.live_tensors import Origin
from trainload.launching.profiling.profile_result import Kind
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.liveness import Storages

aten = torch.ops.aten
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_COPIES = frozenset(
    {
        aten._to_copy.default,
        aten.cat.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.constant_pad_nd.default,
    }
)
"""Operators whose result has the numbers of its inputs in another place."""
_SUMS = frozenset({aten.add.Tensor, aten.add_.Tensor})
_OF_INPUTS = {
    Role.BUCKET: Kind.PARAMETERS,
    Role.BUCKET_GRADIENT: Kind.GRADIENTS,
    Role.ACTIVATION: Kind.ACTIVATIONS,
    Role.SAVED: Kind.ACTIVATIONS,
}
_OF_RESULTS = {Role.ACTIVATION: Kind.ACTIVATIONS, Role.SAVED: Kind.ACTIVATIONS}
Leaves = tuple[Origin | None, ...]


def origins_of(module: GraphModule, graph: BuiltGraph, begin: int) -> dict[Node, Leaves]:
    """Return node -> the origin of each tensor of its value; None for what is no tensor.

    Args:
        module: the graph; every node has `meta["val"]`.
        graph: the graph with its ports.
        begin: number of the first node of backward.
    """
    return _Kinds(module, graph, begin).origins()


class _Kinds:
    def __init__(self, module: GraphModule, graph: BuiltGraph, begin: int) -> None:
        self._nodes: list[Node] = list(module.graph.nodes)
        self._begin = begin
        self._storages = Storages(module)
        self._kinds: dict[int, Kind] = {}
        self._buckets: dict[int, str] = {}
        placeholders, results = ends(module)
        self._inputs = list(zip(placeholders, graph.inputs, strict=True))
        self._results = list(zip(results, graph.outputs, strict=True))

    def origins(self) -> dict[Node, Leaves]:
        self._mark_inputs()
        self._mark_gathered()
        self._mark_gradients()
        self._mark_activations()
        made = {
            storage: module_of(node)
            for node, storages in self._storages.allocated.items()
            for storage in storages
        }
        return {
            node: tuple(
                None
                if storage is None
                else Origin(
                    self._kinds.get(storage, Kind.OTHER),
                    made.get(storage, ""),
                    self._buckets.get(storage, ""),
                )
                for storage in storages
            )
            for node, storages in self._storages.of.items()
        }

    def _of(self, node: Node) -> list[int]:
        return [storage for storage in self._storages.of[node] if storage is not None]

    def _new(self, node: Node) -> Sequence[int]:
        return self._storages.allocated.get(node, ())

    def _mark(self, storages: Sequence[int], kind: Kind, bucket: str = "") -> None:
        for storage in storages:
            if storage not in self._kinds:
                self._kinds[storage] = kind
                self._buckets[storage] = bucket

    def _mark_inputs(self) -> None:
        for node, port in self._inputs:
            is_bucket = port.role in (Role.BUCKET, Role.BUCKET_GRADIENT)
            kind = _OF_INPUTS.get(port.role, Kind.OTHER)
            self._mark(self._of(node), kind, port.name if is_bucket else "")

    def _mark_gathered(self) -> None:
        """Mark what is gathered from the ranks' parts of the parameters."""
        buckets = {
            storage: port.name
            for node, port in self._inputs
            if port.role is Role.BUCKET
            for storage in self._of(node)
        }
        for node in self._nodes:
            inputs = {storage for source in node.all_input_nodes for storage in self._of(source)}
            if not self._new(node) or not inputs or not inputs <= buckets.keys():
                continue
            is_gathered = any(self._kinds.get(storage) is Kind.GATHERED for storage in inputs)
            if node.target is not _GATHER and node.target not in _COPIES:
                continue
            names = {buckets[storage] for storage in inputs}
            bucket = names.pop() if len(names) == 1 else ""
            if node.target is _GATHER or is_gathered:
                self._mark(self._new(node), Kind.GATHERED, bucket)
            buckets.update(dict.fromkeys(self._new(node), bucket))

    def _mark_gradients(self) -> None:
        """Mark the gradients of buckets, and what only puts them together."""
        for node, port in self._results:
            if port.role is Role.BUCKET_GRADIENT:
                self._mark(self._of(node), Kind.GRADIENTS, port.name)
        gradients = (Kind.GRADIENTS, Kind.PARTIAL)
        for node in reversed(self._nodes):
            made = [each for each in self._new(node) if self._kinds.get(each) in gradients]
            if made and (is_collective(node) or node.target in _COPIES | _SUMS):
                for source in node.all_input_nodes:
                    self._mark(self._of(source), Kind.PARTIAL, self._buckets[made[0]])

    def _mark_activations(self) -> None:
        for node, port in self._results:
            if port.role in _OF_RESULTS:
                self._mark(self._of(node), _OF_RESULTS[port.role])
        forward = set(self._nodes[: self._begin])
        for node in self._nodes[self._begin :]:
            for source in node.all_input_nodes:
                if source in forward:
                    self._mark(self._of(source), Kind.ACTIVATIONS)
