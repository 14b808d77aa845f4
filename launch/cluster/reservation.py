"""Reserve devices of nodes in a placement group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainload.launching.cluster.nodes import NODE_LABEL

RESERVE_SECONDS = 10.0
"""Time after which devices that were free, as far as the driver knew, count as taken."""


class DevicesTakenError(Exception):
    """Devices of nodes that were free have been taken by something else."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(f"devices of these nodes are in use: {', '.join(nodes)}")
        self.nodes = nodes


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Devices of nodes, which are freed together.

    Attributes:
        devices: id of each node -> number of devices.
    """

    devices: Mapping[str, int]
    _group: PlacementGroup

    def strategy(self, node: str) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy of what uses the devices of a node."""
        index = list(self.devices).index(node)
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)

    def free(self) -> None:
        """Free the devices. What uses them ends."""
        remove_placement_group(self._group)


def reserve(devices: Mapping[str, int], resource: str) -> Reservation:
    """Reserve devices of nodes, all or none. Ray's view of them may be a second old.

    If two runs want the same nodes, one of them has all it wants, and neither waits for the other
    while it holds some.

    Args:
        devices: id of each node -> number of devices.
        resource: name of the devices: CPU or GPU.

    Raises:
        DevicesTakenError: they are not free on all of the nodes.
    """
    group = placement_group(
        [{resource: float(count)} for count in devices.values()],
        bundle_label_selector=[{NODE_LABEL: node} for node in devices],
    )
    try:
        if not group.wait(RESERVE_SECONDS):
            raise DevicesTakenError(*devices)
    except BaseException:
        remove_placement_group(group)
        raise
    return Reservation(devices, group)


@contextmanager
def reserved(node: str, resource: str, count: int) -> Iterator[PlacementGroupSchedulingStrategy]:
    """Reserve devices of one node like `reserve` within the context.

    Yields:
        The scheduling strategy of tasks that use them.
    """
    reservation = reserve({node: count}, resource)
    try:
        yield reservation.strategy(node)
    finally:
        reservation.free()
