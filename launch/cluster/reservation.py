"""Reserve devices of a node in a placement group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainload.launching.cluster.nodes import NODE_LABEL

RESERVE_SECONDS = 10.0
"""Time after which devices that were free, as far as the driver knew, count as taken."""


class DevicesTakenError(Exception):
    """The devices of a node that were free have been taken by something else."""

    def __init__(self, node: str) -> None:
        super().__init__(f"the devices of node {node} are in use")
        self.node = node


def reserve(devices: Mapping[str, int], resource: str) -> dict[str, PlacementGroup]:
    """Reserve devices of nodes. Ray's view of them may be a second old.

    Each node has a placement group of its own, so that a run which leaves a node frees its devices
    and keeps the others. The groups are not one atomic request: if two runs want the same nodes,
    each may have some of them, and both fail.

    Args:
        devices: id of each node -> number of devices.
        resource: name of the devices: CPU or GPU.

    Returns:
        Node -> its placement group.

    Raises:
        DevicesTakenError: they are not free on some node; then none are reserved.
    """
    groups: dict[str, PlacementGroup] = {
        node: placement_group(
            [{resource: float(count)}], bundle_label_selector=[{NODE_LABEL: node}]
        )
        for node, count in devices.items()
    }
    until = time.monotonic() + RESERVE_SECONDS
    try:
        for node, group in groups.items():
            if not group.wait(max(0.0, until - time.monotonic())):
                raise DevicesTakenError(node)
    except BaseException:
        for each in groups.values():
            remove_placement_group(each)
        raise
    return groups


@contextmanager
def reserved(node: str, resource: str, count: int) -> Iterator[PlacementGroupSchedulingStrategy]:
    """Reserve devices of one node like `reserve` within the context.

    Yields:
        The scheduling strategy of tasks that use them.
    """
    group = reserve({node: count}, resource)[node]
    try:
        yield PlacementGroupSchedulingStrategy(group)
    finally:
        remove_placement_group(group)
