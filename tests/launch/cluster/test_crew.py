"""Node actors of a run and the devices that are reserved for them, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from trainload.launching.cluster import crew as module
from trainload.launching.cluster.crew import Crew
from trainload.launching.cluster.nodes import Node
from trainload.launching.cluster.reservation import DevicesTakenError
from trainload.launching.ranks.fork_server import ServerOptions


@dataclass
class FakeCluster:
    """Devices that a crew has reserved, and the actors that it has created; each node has two
    devices.
    """

    reserved: dict[str, int] = field(default_factory=dict)
    actors: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    def reserve(self, devices: Mapping[str, int], resource: str) -> dict[str, str]:
        for node, count in devices.items():
            if self.reserved.get(node, 0) + count > 2:
                raise DevicesTakenError(node)
        self.reserved |= devices
        return {node: node for node in devices}

    def create(self, node: str, _: ServerOptions) -> str:
        self.actors.append(node)
        return f"actor {len(self.actors)} on {node}"

    def nodes(self, device: str) -> list[Node]:
        return [Node(name, "", 2, 2 - self.reserved.get(name, 0)) for name in "abc"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    found = FakeCluster()
    remote = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=found.create))
    monkeypatch.setattr(module, "reserve", found.reserve)
    monkeypatch.setattr(module, "nodes_of", found.nodes)
    monkeypatch.setattr(module, "remove_placement_group", found.reserved.pop)
    monkeypatch.setattr("ray.remote", lambda actor: remote)
    monkeypatch.setattr("ray.kill", found.killed.append)
    return found


@pytest.fixture
def crew(cluster: FakeCluster) -> Crew:
    return Crew("cpu", ServerOptions(0.0))


def test_an_actor_serves_the_next_attempt(crew: Crew, cluster: FakeCluster) -> None:
    assert crew.seat("ab") == crew.seat("ab")
    assert cluster.actors == ["a", "b"]


def test_a_run_that_moves_keeps_the_actor_of_the_node_that_stays(
    crew: Crew, cluster: FakeCluster
) -> None:
    before = crew.seat("ab")
    after = crew.seat("ac")
    assert after["a"] == before["a"]
    assert cluster.killed == [before["b"]]


def test_the_devices_of_a_node_that_was_left_are_free(crew: Crew, cluster: FakeCluster) -> None:
    crew.seat("ab")
    crew.seat("a")
    assert cluster.reserved == {"a": 1}


def test_devices_of_the_crew_count_as_free(crew: Crew) -> None:
    crew.seat("aab")
    assert [node.free for node in crew.nodes()] == [2, 2, 2]


def test_another_number_of_devices_needs_another_actor(crew: Crew, cluster: FakeCluster) -> None:
    crew.seat("aabb")
    crew.seat("aab")
    assert cluster.reserved == {"a": 2, "b": 1}
    assert cluster.actors == ["a", "b", "b"]


def test_if_devices_are_taken_there_are_no_new_actors(crew: Crew, cluster: FakeCluster) -> None:
    cluster.reserved["b"] = 2
    with pytest.raises(DevicesTakenError):
        crew.seat("ab")
    assert cluster.actors == []


def test_a_crew_that_is_closed_holds_nothing(crew: Crew, cluster: FakeCluster) -> None:
    actors: dict[str, Any] = crew.seat("ab")
    crew.close()
    assert sorted(cluster.killed) == sorted(actors.values())
    assert cluster.reserved == {}
