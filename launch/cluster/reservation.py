"""Reserve devices of a node in a placement group."""

from __future__ import annotations

from collections.abc import Iterator
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


def reserve(node: str, resource: str, count: int) -> PlacementGroup:
    """Reserve devices of a node. Ray's view of them may be a second old.

    Args:
        node: id of the node.
        resource: name of the devices: CPU or GPU.
        count: number of devices.

    Raises:
        DevicesTakenError: they are not free.
    """
    group: PlacementGroup = placement_group(
        [{resource: float(count)}], bundle_label_selector=[{NODE_LABEL: node}]
    )
    if not group.wait(RESERVE_SECONDS):
        remove_placement_group(group)
        raise DevicesTakenError(node)
    return group


@contextmanager
def reserved(node: str, resource: str, count: int) -> Iterator[PlacementGroupSchedulingStrategy]:
    """Reserve devices like `reserve` within the context.

    Yields:
        The scheduling strategy of tasks that use them.
    """
    group = reserve(node, resource, count)
    try:
        yield PlacementGroupSchedulingStrategy(group)
    finally:
        remove_placement_group(group)
