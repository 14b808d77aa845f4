"""Activation offload: values that forward keeps for backward are in the host's memory meanwhile.

Forward is divided into parts that keep about the same number of bytes. The values of a part are
copied to the host while the next part is computed, and copied back while backward uses the values
of the next part. So a copy has as much time as a part takes, and the device holds the values of
two parts more than it would if copies took no time.

The order of copies and waits is that of the graph. How long the device waits for them depends on
its link to the host: `sharding/planner/rank_timeline.py` estimates it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from trainload.autograd_trace.graph_calls import append
from trainload.autograd_trace.graphs import ADDED, CHUNK, StepGraph
from trainload.autograd_trace.recompute.host_copies import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from trainload.capture.operators import is_collective
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import copy_of, mode_of
from trainload.sharding.analysis.liveness import storage_elements
from trainload.sharding.analysis.node_costs import elements
from trainload.sharding.rewriting.forward_values import Forward, has_backward

_PARTS = 16
"""Number of parts into which forward is divided."""
_SMALL = 1 / 256
"""Values with less than this fraction of their part's bytes stay on the device."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def offload_kept(step: StepGraph, fraction: float) -> StepGraph:
    """Return the same step graph with values kept on the host. No value changes.

    Args:
        step: step graph of one rank of the tensor axis.
        fraction: fraction of the parts of forward whose values are offloaded, from 0 to 1. The
            last part's are never: backward begins with them.
    """
    if not fraction or not has_backward(step):
        return step
    step = copy_of(step)
    _Offloader(step).run(fraction)
    return step


def check_offload(steps: Iterable[StepGraph], where: str) -> None:
    """Raise PlanError if offloaded step graphs offload nothing."""
    if not any(node.target is OFFLOAD for step in steps for node in step.module.graph.nodes):
        raise PlanError(
            "there is no value, kept from forward to backward, that could be offloaded",
            where=where,
            hint="Leave offload at 0.",
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A storage that is kept: the node whose value is all of it, the index of the node of forward
    after which it can be copied, and its bytes.
    """

    storage: int
    value: Node
    ready: int
    bytes: int


class _Offloader:
    """Rewrites one graph, in place."""

    def __init__(self, step: StepGraph) -> None:
        self._graph = step.module.graph
        self._mode = mode_of(self._graph.find_nodes(op="placeholder"))
        self._forward = Forward(step)
        self._computed = set(self._forward.nodes)
        *backward, output = self._forward.backward
        self._backward = [node for node in backward if not self._is_size(node)]
        self._place = {node: index for index, node in enumerate(self._graph.nodes)}
        self._uses = self._find_uses()
        returned = {
            storage
            for result in output.all_input_nodes
            for storage in self._forward.storages_of(result)
        }
        self._kept = [
            kept
            for storage in self._uses
            if storage not in returned and (kept := self._find_kept(storage)) is not None
        ]
        self._kept.sort(key=lambda kept: kept.ready)

    def _is_size(self, node: Node) -> bool:
        """Return True if a node of backward is the size of a value of forward. It is moved there,
        since it would keep the value.
        """
        if not isinstance(node.meta.get("val"), SymInt):
            return False
        source = node.all_input_nodes[0]
        if source not in self._computed:
            return False
        source.append(node)
        return True

    def _find_uses(self) -> dict[int, list[tuple[Node, Node]]]:
        """Return storage of forward -> the nodes of backward that read it, in order, each with the
        node of forward that it reads. Storages that backward reads as part of several are left out.
        """
        uses: dict[int, list[tuple[Node, Node]]] = {}
        of_several: set[int] = set()
        for node in self._backward:
            for source in node.all_input_nodes:
                storages = self._forward.storages_of(source)
                if source in self._computed and self._forward.spans.keys() >= set(storages):
                    for storage in storages:
                        uses.setdefault(storage, []).append((node, source))
                    of_several |= set(storages if len(storages) > 1 else ())
        return {storage: found for storage, found in uses.items() if storage not in of_several}

    def _find_kept(self, storage: int) -> _Kept | None:
        """Return a storage that can be offloaded; None for others."""
        span = self._forward.spans[storage]
        for index in range(span.first, len(self._forward.nodes)):
            node = self._forward.nodes[index]
            value = node.meta["val"]
            if self._forward.storages.of[node] != (storage,) or not isinstance(value, Tensor):
                continue
            if is_collective(node) and node.target is not _WAIT:
                continue  # in flight
            fits = CHUNK not in node.meta and _is_dense(value)
            return _Kept(storage, node, index, span.bytes) if fits and span.bytes else None
        return None

    def run(self, fraction: float) -> None:
        """Offload the values of a fraction of the parts."""
        parts = self._parts()
        for index, (part, after) in enumerate(pairwise(parts)):
            if math.ceil((index + 1) * fraction) > math.ceil(index * fraction):
                large = self._large(part)
                self._copy_back(large, after, *self._copy_out(large, after))

    def _parts(self) -> list[list[_Kept]]:
        """Divide the kept values into parts of about the same bytes."""
        size = sum(kept.bytes for kept in self._kept) / _PARTS
        parts: list[list[_Kept]] = [[]]
        so_far = 0.0
        for kept in self._kept:
            if parts[-1] and so_far >= size * len(parts):
                parts.append([])
            parts[-1].append(kept)
            so_far += kept.bytes
        return parts

    def _large(self, part: Sequence[_Kept]) -> list[_Kept]:
        least = _SMALL * sum(kept.bytes for kept in part)
        return [kept for kept in part if kept.bytes >= least]

    def _copy_out(self, part: Sequence[_Kept], after: Sequence[_Kept]) -> tuple[list[Node], Node]:
        """Copy the values of a part to the host while the next part is computed. Return the copies
        and the node that waits for them.
        """
        hosts: list[Node] = []
        for kept in part:
            with self._graph.inserting_after(kept.value):
                hosts.append(self._append(OFFLOAD, kept.value))
        with self._graph.inserting_after(after[-1].value):
            return hosts, self._append(OFFLOADED, hosts, [kept.value for kept in part])

    def _copy_back(
        self, part: Sequence[_Kept], after: Sequence[_Kept], hosts: Sequence[Node], copied: Node
    ) -> None:
        """Copy the values of a part back when backward begins to use those of the next one."""
        begin = self._first_use((*part, *after))
        for host, kept in sorted(
            zip(hosts, part, strict=True), key=lambda each: self._place[self._first_use([each[1]])]
        ):
            device = kept.value.meta["val"].device
            with self._graph.inserting_before(begin):
                handle = self._append(RELOAD, host, copied, device)
            with self._graph.inserting_before(self._first_use([kept])):
                self._replace(kept, self._append(RELOADED, handle, host, device))

    def _first_use(self, part: Iterable[_Kept]) -> Node:
        """Return the first node of backward that reads a value of a part."""
        first = (self._uses[kept.storage][0][0] for kept in part)
        return min(first, key=self._place.__getitem__)

    def _replace(self, kept: _Kept, reloaded: Node) -> None:
        """Let backward read a reloaded value, and views of it, where it reads those of forward."""
        again = {kept.value: reloaded}

        def view_again(source: Node) -> Node:
            if source not in again:
                sources = {
                    each: view_again(each)
                    for each in source.all_input_nodes
                    if kept.storage in self._forward.storages_of(each)
                }
                again[source] = self._graph.node_copy(source, lambda n: sources.get(n, n))
            return again[source]

        for node, source in self._uses[kept.storage]:
            node.replace_input_with(source, view_again(source))

    def _append(self, target: Callable[..., Any], *args: Any) -> Node:
        node = append(self._graph, self._mode, target, *args)
        node.meta[ADDED] = True
        return node


def _is_dense(value: Tensor) -> bool:
    """Return True if a tensor's elements fill its memory, each of them once."""
    return storage_elements(value) == elements(value)
