"""The node actors of a run, which serve all of its attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainload.launching.cluster.node_actor import NodeActor
from trainload.launching.cluster.nodes import Node, nodes_of, resource_of
from trainload.launching.cluster.reservation import reserve
from trainload.launching.ranks.fork_server import ServerOptions
from trainload.sharding.plans.plan import DeviceKind

_CALLS = 16
"""Concurrent calls of a node actor, most of which wait."""


@dataclass(frozen=True, slots=True)
class _Member:
    actor: Any
    devices: int
    group: PlacementGroup


class Crew:
    """One node actor per node of a run, with the node's devices.

    Actors outlive attempts, so that the ranks of the next attempt start without new interpreters.

    Args:
        device: kind of the devices.
        fork_server: the fork server of a node.
    """

    def __init__(self, device: DeviceKind, fork_server: ServerOptions) -> None:
        self._device = device
        self._fork_server = fork_server
        self._members: dict[str, _Member] = {}

    def nodes(self) -> list[Node]:
        """Return the nodes of the cluster, with the devices of the crew counted as free."""
        own = {node: member.devices for node, member in list(self._members.items())}
        return [
            replace(node, free=node.free + own.get(node.id, 0)) for node in nodes_of(self._device)
        ]

    def seat(self, seats: Sequence[str]) -> dict[str, Any]:
        """Return node -> its actor for the nodes of an attempt, in the order of their first ranks.

        Actors of other nodes, or with other numbers of devices, are released first.

        Raises:
            DevicesTakenError: devices are in use by something else.
        """
        wanted = Counter(seats)
        self.release(
            [node for node, member in self._members.items() if wanted.get(node) != member.devices]
        )
        self._create({node: n for node, n in wanted.items() if node not in self._members})
        return {node: self._members[node].actor for node in wanted}

    def release(self, nodes: Collection[str]) -> None:
        """Kill the actors of nodes, with their ranks, and free the devices."""
        for node in set(nodes) & self._members.keys():
            member = self._members.pop(node)
            ray.kill(member.actor)
            remove_placement_group(member.group)

    def close(self) -> None:
        """Release all nodes."""
        self.release(list(self._members))

    def _create(self, wanted: Mapping[str, int]) -> None:
        """Create actors: node -> number of its devices.

        Raises:
            DevicesTakenError: as for `seat`; then none of them is created.
        """
        name = resource_of(self._device)
        for node, group in reserve(wanted, name).items():
            devices = wanted[node]
            own = {"num_gpus": devices, "num_cpus": 0} if name == "GPU" else {"num_cpus": devices}
            actor = (
                ray.remote(NodeActor)
                .options(
                    **own,
                    max_concurrency=_CALLS,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group),
                )
                .remote(node, self._fork_server)
            )
            self._members[node] = _Member(actor, devices, group)
