"""The node actors of a run, which serve all of its attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import ray

from trainload.launching.cluster.node_actor import NodeActor
from trainload.launching.cluster.nodes import Node, nodes_of, resource_of
from trainload.launching.cluster.reservation import Reservation, reserve
from trainload.launching.ranks.fork_server import ServerOptions
from trainload.sharding.plans.plan import DeviceKind

_CALLS = 16
"""Concurrent calls of a node actor, most of which wait."""


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
        self._actors: dict[str, Any] = {}
        self._reserved: dict[str, Reservation] = {}

    def nodes(self) -> list[Node]:
        """Return the nodes of the cluster, with the devices of the crew counted as free."""
        own = {node: held.devices[node] for node, held in list(self._reserved.items())}
        return [
            replace(node, free=node.free + own.get(node.id, 0)) for node in nodes_of(self._device)
        ]

    def seat(self, seats: Sequence[str]) -> dict[str, Any]:
        """Return node -> its actor for the nodes of an attempt, in the order of their first ranks.

        Actors of other nodes, or with other numbers of devices, are released first.

        Raises:
            DevicesTakenError: devices are in use by something else; then no actor is created.
        """
        wanted = Counter(seats)
        unfit = {
            held
            for node, held in self._reserved.items()
            if node in wanted and wanted[node] != held.devices[node]
        }
        self.release(
            [node for node in self._actors if node not in wanted or self._reserved[node] in unfit]
        )
        missing = {node: n for node, n in wanted.items() if node not in self._reserved}
        if missing:
            reservation = reserve(missing, resource_of(self._device))
            self._reserved |= dict.fromkeys(missing, reservation)
        for node in wanted:
            if node not in self._actors:
                self._actors[node] = self._actor(node)
        return {node: self._actors[node] for node in wanted}

    def release(self, nodes: Collection[str]) -> None:
        """Kill the actors of nodes, with their ranks.

        The devices are free once no actor is left of those with which they were reserved. Until
        then `seat` can use them again.
        """
        for node in set(nodes) & self._actors.keys():
            ray.kill(self._actors.pop(node))
        used = {self._reserved[node] for node in self._actors}
        for each in set(self._reserved.values()) - used:
            each.free()
        self._reserved = {node: held for node, held in self._reserved.items() if held in used}

    def close(self) -> None:
        """Release all nodes."""
        self.release(list(self._actors))

    def _actor(self, node: str) -> Any:
        """Create the actor of a node whose devices are reserved."""
        held = self._reserved[node]
        number = held.devices[node]
        is_gpu = resource_of(self._device) == "GPU"
        own = {"num_gpus": number, "num_cpus": 0} if is_gpu else {"num_cpus": number}
        return (
            ray.remote(NodeActor)
            .options(**own, max_concurrency=_CALLS, scheduling_strategy=held.strategy(node))
            .remote(node, self._fork_server)
        )
