"""Nodes of a Ray cluster, by Ray's ids, and the placement of a plan's workers on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.autoscaler.v2.sdk import get_cluster_status

from trainload.core.errors import ClusterError, LostClusterError
from trainload.sharding.plans.plan import DeviceKind, Plan

NODE_LABEL = "ray.io/node-id"
_ACCELERATOR_PREFIX = "accelerator_type:"
_DRAINING = "DRAINING"
_RESOURCES: Mapping[DeviceKind, str] = {"cpu": "CPU", "cuda": "GPU"}


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive.

    Attributes:
        id: Ray's id of the node.
        kind: its accelerator type; "" for none.
        devices: number of its devices of the kind that was asked for (CPU or GPU).
        free: number of these that are free.
        leaving: True if the node is draining and will be removed.
    """

    id: str
    kind: str
    devices: int
    free: int
    leaving: bool = False


def resource_of(device: DeviceKind) -> str:
    """Return Ray's resource name of a device kind."""
    return _RESOURCES[device]


def nodes_of(device: DeviceKind) -> list[Node]:
    """Return all nodes that are alive and have such devices, sorted by id.

    Raises:
        RayError: the cluster does not respond.
    """
    name = resource_of(device)
    nodes = []
    for node in _node_infos():
        resources = node.total_resources()
        if resources.get(name, 0) >= 1:
            kind = next(
                (
                    key.removeprefix(_ACCELERATOR_PREFIX)
                    for key in sorted(resources)
                    if key.startswith(_ACCELERATOR_PREFIX)
                ),
                "",
            )
            nodes.append(
                Node(
                    node.node_id,
                    kind,
                    int(resources[name]),
                    int(node.available_resources()[name]),
                    node.node_status == _DRAINING,
                )
            )
    return sorted(nodes, key=lambda node: node.id)


def _node_infos() -> list[Any]:
    """Return Ray's `NodeInfo` of every node that is alive."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return [*status.active_nodes, *status.idle_nodes]


def unit_of(plan: Plan) -> int:
    """Return the number of neighboring ranks that must share a node.

    Those are the ranks of the tensor axis and of a hybrid plan's shards, if the plan has them
    inside a node.
    """
    inside = plan.cluster.devices_per_node
    hybrid = plan.tensor_ranks * (plan.shard_ranks or 1)
    return next(
        (
            unit
            for unit in (hybrid, plan.tensor_ranks)
            if unit <= inside and plan.world_size % unit == 0
        ),
        1,
    )


def seats(
    plan: Plan, nodes: Sequence[Node], *, free: bool = True, without: Collection[str] = ()
) -> list[str] | None:
    """Return the id of each rank's node, by rank; None if the ranks do not fit.

    All nodes are of one kind, and those with most room come first, so that a run uses as few nodes
    as possible. Neighboring ranks that belong together (`unit_of`) are on the same node.

    Args:
        plan: plan of the ranks.
        nodes: available nodes.
        free: True to count free devices only.
        without: ids of nodes that are not used.
    """
    unit = unit_of(plan)
    kinds: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for node in nodes:
        room = (node.free if free else node.devices) // unit * unit
        if room and not node.leaving and node.id not in without:
            kinds[node.kind].append((-room, node.id))
    for rooms in sorted(kinds.values(), key=lambda rooms: sum(room for room, _ in rooms)):
        if -sum(room for room, _ in rooms) < plan.world_size:
            continue
        node_ids: list[str] = []
        for room, node_id in sorted(rooms):
            node_ids += [node_id] * min(-room, plan.world_size - len(node_ids))
        return node_ids
    return None


def place_to_try(plan: Plan, least: Plan, nodes: Sequence[Node]) -> tuple[str, int]:
    """Return the node for a trial of a plan's first rank, which has a free device, and the number
    of the plan's ranks on it.

    Args:
        plan: plan of the rank.
        least: the run's plan with the fewest ranks, for which the cluster is large enough
            (`check_seats`).
        nodes: available nodes.

    Raises:
        ClusterError: all devices are in use.
    """
    places = (
        seats(plan, nodes)
        or seats(least, nodes)
        or seats(plan, nodes, free=False)
        or seats(least, nodes, free=False)
        or []
    )
    free = {node.id: node.free for node in nodes}
    place = next((place for place in places if free[place] > 0), None)
    if place is None:
        raise in_use_error(
            plan.cluster.device,
            f"{len(nodes)} nodes",
            ", ".join(f"{node.free} of {node.devices}" for node in nodes),
        )
    return place, places.count(place)


def in_use_error(device: DeviceKind, where: str, got: str) -> ClusterError:
    """Return the error for a trial step without a free device."""
    name = resource_of(device)
    return ClusterError(
        "a trial step cannot run: all devices are in use",
        where=f"{where} with {name}s",
        expected=f"1 free {name}",
        got=got,
        hint="Try again when a device is free. A launch waits for free devices.",
    )


@contextmanager
def room_asked_for(plan: Plan | None) -> Iterator[None]:
    """Request the nodes of a plan from Ray's autoscaler within the context; None requests nothing.

    It has no effect without an autoscaler. Ray keeps one such request for the whole cluster, the
    last one that was made.
    """
    if plan is None:
        yield
        return
    request_resources(
        bundles=[{resource_of(plan.cluster.device): plan.cluster.devices_per_node}]
        * plan.cluster.nodes
    )
    try:
        yield
    except LostClusterError:  # the request cannot be withdrawn
        raise
    except BaseException:
        request_resources()
        raise
    request_resources()


def check_seats(plan: Plan, nodes: Sequence[Node]) -> None:
    """Check that the cluster is large enough for a plan if nothing else uses it.

    Raises:
        ClusterError: it is not; the error names the available and the required devices.
    """
    if seats(plan, nodes, free=False) is not None:
        return
    name, workers, unit = resource_of(plan.cluster.device), plan.world_size, unit_of(plan)
    devices = sum(node.devices for node in nodes)
    spread = (
        ", ".join(f"{node.devices}{f' {node.kind}' if node.kind else ''}" for node in nodes)
        or "none"
    )
    if devices < workers:
        raise ClusterError(
            "the cluster is too small for the plan",
            where=f"{len(nodes)} nodes with {name}s",
            expected=f"{workers} {name}s for {workers} workers",
            got=f"{devices} {name}s",
            hint=f"Plan for at most {devices} workers, or add nodes to the cluster.",
        )
    raise ClusterError(
        "the cluster's nodes do not fit the plan",
        where=f"{len(nodes)} nodes with {name}s",
        expected=f"{workers} {name}s of one kind"
        + (f", in groups of {unit} per node" if unit > 1 else ""),
        got=spread,
        hint=(
            "Make a plan for these nodes: a run uses nodes of one kind, and each tensor group must"
            " fit on a node."
        ),
    )
