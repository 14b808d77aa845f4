"""Memory of a running graph: its storages, when each is allocated, and the last use of the values
in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.recompute.host_copies import OFFLOAD, RELOAD, RELOADED
from trainload.capture.operators import bodies_of, is_collective, is_overload
from trainload.sharding.analysis.node_costs import EXAMPLE, Sizes, number

aten = torch.ops.aten
_SHARES_STORAGE: set[Any] = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    torch.ops._c10d_functional.wait_tensor.default,
    RELOADED,
}
"""Operators whose result shares the first operand's storage, although their schemas do not say
so.
"""
_SHARES_IF_CONTIGUOUS: set[Any] = {aten.reshape.default, aten.contiguous.default}
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_READ_UNTIL_WAIT: set[Any] = {
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
ROUNDED = 64
"""Allocators round to multiples of this number of bytes; CUDA's, to 512."""


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Memory that a running graph holds in addition to its inputs.

    Attributes:
        peak: maximum, in bytes.
        left: bytes of its results that are not inputs.
        communication: bytes of the peak that collectives have made.
        at: the node that was computed at the peak; empty if nothing was.
        host: maximum of the bytes that offloaded values take in the host's memory.
    """

    peak: int
    left: int
    communication: int
    at: str
    host: int = 0


def storage_bytes(value: Tensor, sizes: Sizes = EXAMPLE) -> int:
    """Return the bytes of a tensor's storage; repeated elements of an expanded tensor count
    once.
    """
    return -(-storage_elements(value, sizes) * value.element_size() // ROUNDED) * ROUNDED


def storage_elements(value: Tensor, sizes: Sizes = EXAMPLE) -> int:
    """Return the number of elements of a tensor's storage."""
    shape, strides = (
        [number(each, sizes) for each in per_dim] for per_dim in (value.shape, value.stride())
    )
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class Storages:
    """The storage of each value of a graph.

    Args:
        module: the graph; every node has `meta["val"]`.
        sizes: the value of each symbol.

    Attributes:
        of: node -> the index of the storage of each tensor of its value.
        bytes: bytes of each storage on the device; 0 for those of inputs.
        host: bytes of each storage in the host's memory; only storages of offloaded values have
            any.
        allocated: node -> the storages that it allocates.
    """

    def __init__(self, module: GraphModule, sizes: Sizes = EXAMPLE) -> None:
        self._module, self._sizes = module, sizes
        self.of: dict[Node, tuple[int | None, ...]] = {}
        self.bytes: list[int] = []
        self.host: list[int] = []
        self.allocated: dict[Node, list[int]] = {}
        for node in module.graph.nodes:
            self._assign_storage(node)

    def _assign_storage(self, node: Node) -> None:
        value = node.meta.get("val")
        if node.op == "placeholder":
            self.of[node] = (self._add_storage(node, 0),) if isinstance(value, Tensor) else (None,)
            return
        if node.op != "call_function":
            self.of[node] = ()
            return
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            storages, at = self.of[node.args[0]], node.args[1]
            assert isinstance(at, int)
            # several views of one storage count as one
            self.of[node] = (storages[at],) if at < len(storages) else storages[:1]
            return
        same = self._base(node)
        if same is not None:
            self.of[node] = self.of[same][:1]
            return
        if node.target is RELOAD:  # its value is a handle of a copy of its operand
            host: Any = node.args[0]
            value = host.meta["val"]
        values = value if isinstance(value, tuple | list) else (value,)
        self.of[node] = tuple(
            self._add_storage(node, storage_bytes(v, self._sizes))
            if isinstance(v, Tensor)
            else None
            for v in values
        )

    def _add_storage(self, node: Node, size: int) -> int:
        on_host = node.target is OFFLOAD
        self.bytes.append(0 if on_host else size)
        self.host.append(size if on_host else 0)
        self.allocated.setdefault(node, []).append(len(self.bytes) - 1)
        return len(self.bytes) - 1

    def _base(self, node: Node) -> Node | None:
        """Return the operand whose storage a node's value shares, or None."""
        target = node.target
        if not is_overload(target) or not node.args or not isinstance(node.args[0], Node):
            return None
        source = node.args[0]
        if target in _SHARES_STORAGE:
            return source
        if target in _SHARES_IF_CONTIGUOUS:
            return source if _is_contiguous(source.meta["val"]) else None
        schema = target._schema
        aliased = [result.alias_info for result in schema.returns if result.alias_info is not None]
        return source if aliased and schema.arguments[0].alias_info is not None else None


def _is_contiguous(value: Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(size) == "1":
            continue
        if str(stride) != str(expected):
            return False
        expected = expected * size
    return True


@dataclass(frozen=True, slots=True)
class Moment:
    """The time at which a running graph computes a node.

    Attributes:
        node: the node.
        allocated: storages that it allocates.
        freed: storages that nothing needs after it.
        inside: bytes that the bodies of its operator hold while it runs.
    """

    node: Node
    allocated: Sequence[int]
    freed: Sequence[int]
    inside: int


def moments(module: GraphModule, storages: Storages, sizes: Sizes = EXAMPLE) -> Iterator[Moment]:
    """Yield a moment for each operator of a flat graph, in order, with each value kept until its
    last use.

    Args:
        module: the graph; every node has `meta["val"]`.
        storages: its storages.
        sizes: the value of each symbol.
    """
    nodes = list(module.graph.nodes)
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for allocated in storages.allocated.get(node, ()):
            last[allocated] = index
        for source in _values_needed(node):
            for storage in storages.of[source]:
                if storage is not None:
                    last[storage] = max(last.get(storage, 0), index)
    freed: dict[int, list[int]] = {}
    for storage, index in last.items():
        freed.setdefault(index, []).append(storage)
    for index, node in enumerate(nodes):
        if node.op not in ("output", "placeholder"):
            yield Moment(
                node,
                storages.allocated.get(node, ()),
                freed.get(index, ()),
                _body_memory(module, node, sizes),
            )


def held(module: GraphModule, sizes: Sizes = EXAMPLE) -> GraphMemory:
    """Return the memory of a flat graph whose nodes run one after the other, with each value kept
    until its last use.

    Args:
        module: the graph; every node has `meta["val"]`.
        sizes: the value of each symbol.
    """
    storages = Storages(module, sizes)
    sent = {
        allocated
        for node, own in storages.allocated.items()
        if is_collective(node)
        for allocated in own
    }
    alive = flying = on_host = most_on_host = 0
    most = GraphMemory(0, 0, 0, "")
    for moment in moments(module, storages, sizes):
        new, old = moment.allocated, moment.freed
        alive += sum(storages.bytes[allocated] for allocated in new)
        flying += sum(storages.bytes[allocated] for allocated in new if allocated in sent)
        on_host += sum(storages.host[allocated] for allocated in new)
        most_on_host = max(most_on_host, on_host)
        now = alive + moment.inside
        if now > most.peak:
            most = GraphMemory(now, 0, flying, moment.node.name)
        alive -= sum(storages.bytes[storage] for storage in old)
        flying -= sum(storages.bytes[storage] for storage in old if storage in sent)
        on_host -= sum(storages.host[storage] for storage in old)
    return replace(most, left=alive, host=most_on_host)


def _values_needed(node: Node) -> Iterator[Node]:
    """Yield the values that a node needs in memory: its operands and, for a wait, the inputs that
    the collective reads until then.

    Other collectives work on a copy.
    """
    yield from node.all_input_nodes
    if (
        node.target is _WAIT
        and isinstance(node.args[0], Node)
        and node.args[0].target in _READ_UNTIL_WAIT
    ):
        yield from node.args[0].all_input_nodes


def _body_memory(module: GraphModule, node: Node, sizes: Sizes) -> int:
    """Return the memory that the bodies of an operator hold while it runs."""
    return max((held(body, sizes).peak for body in bodies_of(module, node).values()), default=0)
