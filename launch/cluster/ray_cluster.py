"""The Ray cluster of a run: its nodes, its mailbox and its attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ray

from trainload.launching.cluster.attempt import Attempt
from trainload.launching.cluster.crew import Crew
from trainload.launching.cluster.mailbox import Collected, Mailbox
from trainload.launching.cluster.nodes import Node
from trainload.launching.cluster.reachability import unreachable
from trainload.launching.cluster.tasks import on_node
from trainload.launching.ranks.fork_server import ServerOptions
from trainload.launching.run.contact import Wanted
from trainload.launching.run.run_spec import RunSpec
from trainload.sharding.plans.plan import DeviceKind

_LISTEN_SECONDS = 10.0


class RayCluster:
    """The cluster to which this process is connected, for one run; see `AnyCluster`.

    Args:
        device: kind of the run's devices.
        fork_server: the fork server of a node.
    """

    def __init__(self, device: DeviceKind, fork_server: ServerOptions) -> None:
        self._crew = Crew(device, fork_server)
        here = ray.get_runtime_context().get_node_id()
        self._mailbox: Any = on_node(here)(Mailbox).remote()

    def nodes(self) -> list[Node]:
        return self._crew.nodes()

    def unreachable(self, nodes: Collection[str]) -> set[str]:
        return unreachable(nodes)

    def start(self, spec: RunSpec, number: int, seats: Sequence[str]) -> Attempt:
        ray.get(self._mailbox.begin.remote(number))
        return Attempt(spec, self._crew, self._mailbox, number, seats)

    def collect(self, request: Wanted, written: int, number: int) -> Collected:
        collected: Collected = ray.get(
            self._mailbox.collect.remote(request, written, number), timeout=_LISTEN_SECONDS
        )
        return collected

    def release(self) -> None:
        self._crew.close()

    def close(self) -> None:
        self._crew.close()
        ray.kill(self._mailbox)
