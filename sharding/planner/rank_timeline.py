"""Simulate the time that a rank's graph needs on a device.

Kernels run one after the other on one stream, collectives on another, copies to the host and from
it on two more, and each waits for its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.recompute.host_copies import (
    OFFLOAD,
    OFFLOADED,
    RELOAD,
    RELOADED,
)
from trainload.capture.operators import bodies_of, is_collective, is_overload
from trainload.sharding.analysis.node_costs import EXAMPLE, Sizes, bytes_of, flops, number
from trainload.sharding.planner.device import DeviceProfile, Span, seconds_of

aten = torch.ops.aten
_WAITS: set[Any] = {torch.ops._c10d_functional.wait_tensor.default, OFFLOADED, RELOADED}
_NOT_COMPUTED = {
    "getitem",
    "sym_size",
    "sym_numel",
    "sym_stride",
    "_unsafe_view",
    "lift_fresh",
    "detach",
    "alias",
}
_REDUCTIONS = {
    "sum",
    "mean",
    "amax",
    "amin",
    "prod",
    "var",
    "var_mean",
    "any",
    "all",
    "argmax",
    "argmin",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A node and the time it needs.

    Attributes:
        node: its name.
        operator: name of the operator.
        start: start time in seconds, on its stream.
        seconds: duration in seconds.
        why: "products" (operations), "memory" (bytes), "launch", "link" (a collective), "host" (a
            copy to it or from it), "wait" (for one of these), or "" (nothing is computed).
        bytes: bytes read and written, or communicated.
        flops: operations of matrix products.
    """

    node: str
    operator: str
    start: float
    seconds: float
    why: str
    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Time of a graph: `seconds` in total, `exposed` of them waiting for collectives and copies.
    `flops`: operations of matrix products.
    """

    seconds: float
    exposed: float
    flops: float
    rows: tuple[Row, ...]


def timeline(
    module: GraphModule,
    device: DeviceProfile,
    spans: Mapping[str, Span],
    sizes: Sizes = EXAMPLE,
    *,
    compiled: bool = True,
) -> Timeline:
    """Simulate a flat graph.

    Args:
        module: the graph; every node has `meta["val"]`.
        device: device that runs it.
        spans: name of a process group -> its span on the cluster.
        sizes: the value of each symbol.
        compiled: True if elementwise operators are fused with their users.
    """
    fused = _fused(module) if compiled else set()
    now = link_free = exposed = work = 0.0
    host_free = {OFFLOAD: 0.0, RELOAD: 0.0}
    finished_at: dict[Node, float] = {}
    rows: list[Row] = []
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        name = _name(node)
        if device.host is not None and node.target in host_free:
            size = bytes_of(node.all_input_nodes[0], sizes)
            takes = device.host.seconds + size / device.host.bytes_per_second
            start = max(now, host_free[node.target])
            host_free[node.target] = finished_at[node] = start + takes
            rows.append(Row(node.name, name, start, takes, "host", size, 0.0))
            continue
        if node.target in _WAITS:
            finished = (finished_at.get(source, now) for source in node.all_input_nodes)
            waits = max(0.0, max(finished) - now)
            rows.append(Row(node.name, name, now, waits, "wait", 0.0, 0.0))
            now += waits
            exposed += waits
            continue
        if is_collective(node):
            size = (
                bytes_of(node, sizes)
                if name == "all_gather_into_tensor"
                else bytes_of(node.all_input_nodes[0], sizes)
            )
            takes = seconds_of(name, size, spans[str(node.args[-1])], device)
            start = max(now, link_free)
            link_free = finished_at[node] = start + takes
            rows.append(Row(node.name, name, start, takes, "link", size, 0.0))
            continue
        takes, why, moved, products = _kernel(module, node, device, sizes, fused)
        rows.append(Row(node.name, name, now, takes, why, moved, products))
        now += takes
        work += products
    return Timeline(max(now, link_free), exposed + max(0.0, link_free - now), work, tuple(rows))


def _kernel(
    module: GraphModule, node: Node, device: DeviceProfile, sizes: Sizes, fused: set[Node]
) -> tuple[float, str, float, float]:
    """Return a node's seconds, the reason, its bytes and its operations."""
    if not _computes(node):
        return 0.0, "", 0.0, 0.0
    products = flops(node, sizes)
    inner = [timeline(body, device, {}, sizes) for body in bodies_of(module, node).values()]
    if inner and not products:
        rounds = _rounds(node, sizes)
        slowest = max(inner, key=lambda each: each.seconds)
        return (
            rounds * slowest.seconds,
            "products" if slowest.flops else "memory",
            0.0,
            rounds * slowest.flops,
        )
    moved = 0.0 if node in fused else bytes_of(node, sizes)
    moved += sum(bytes_of(source, sizes) for source in node.all_input_nodes if source not in fused)
    is_attention = "scaled_dot_product" in _name(node) or "flex_attention" in _name(node)
    rate = device.rate(_dtype(node)) * (device.attention if is_attention else 1.0)
    by_products, by_memory = products / rate, moved / device.memory_bytes_per_second
    launch = 0.0 if node in fused else device.kernel_seconds
    takes = max(by_products, by_memory)
    why = "launch" if launch > takes else "products" if by_products >= by_memory else "memory"
    return takes + launch, why, moved, products


def _rounds(node: Node, sizes: Sizes) -> int:
    """Return the number of iterations of a loop's body; 1 if the data decide it."""
    if _name(node) not in ("scan", "map", "map_impl"):
        return 1
    xs: Any = node.args[2] if _name(node) == "scan" else node.args[1]
    first = next((each for each in xs if isinstance(each, Node)), None)
    return number(first.meta["val"].shape[0], sizes) if first is not None else 1


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(
        packet.__name__ if packet is not None else getattr(node.target, "__name__", node.target)
    )


def _computes(node: Node) -> bool:
    """Return True if a node computes a tensor."""
    value = node.meta.get("val")
    if not any(
        isinstance(v, Tensor) for v in (value if isinstance(value, tuple | list) else (value,))
    ):
        return False
    return _name(node) not in _NOT_COMPUTED and not (
        is_overload(node.target) and node.target.is_view
    )


def _dtype(node: Node) -> str:
    tensors = [source.meta.get("val") for source in node.all_input_nodes]
    return next(
        (str(t.dtype).removeprefix("torch.") for t in tensors if isinstance(t, Tensor)), "float32"
    )


def _fused(module: GraphModule) -> set[Node]:
    """Return elementwise nodes with a single reader, elementwise or a reduction, so that their
    values are never written to memory.
    """
    fused: set[Node] = set()
    for node in module.graph.nodes:
        if _is_elementwise(node):
            users = _readers(node)
            if len(users) == 1 and (_is_elementwise(users[0]) or _name(users[0]) in _REDUCTIONS):
                fused.add(node)
    return fused


def _readers(node: Node) -> list[Node]:
    """Return the nodes that compute with a node's value, also through views of it."""
    readers: list[Node] = []
    for user in node.users:
        readers += _readers(user) if user.op == "call_function" and not _computes(user) else [user]
    return readers


def _is_elementwise(node: Node) -> bool:
    if node.op != "call_function" or not is_overload(node.target) or not _computes(node):
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in (
        "_to_copy",
        "clone",
        "expand",
        "full",
        "where",
    )
