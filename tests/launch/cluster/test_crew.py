"""Node actors of a run and the devices that are reserved for them, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from trainload.launching.cluster import crew as module
from trainload.launching.cluster.crew import Crew
from trainload.launching.cluster.nodes import Node
from trainload.launching.cluster.reservation import DevicesTakenError
from trainload.launching.ranks.fork_server import ServerOptions


@dataclass(eq=False)
class FakeReservation:
    devices: dict[str, int]
    is_free: bool = False

    def free(self) -> None:
        self.is_free = True


@dataclass
class FakeCluster:
    """Reservations and actors that a crew has made; each node has two devices."""

    reservations: list[FakeReservation] = field(default_factory=list)
    actors: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    def in_use(self, node: str) -> int:
        return sum(each.devices.get(node, 0) for each in self.reservations if not each.is_free)

    def reserve(self, devices: Mapping[str, int], resource: str) -> FakeReservation:
        if any(self.in_use(node) + count > 2 for node, count in devices.items()):
            raise DevicesTakenError(*devices)
        self.reservations.append(FakeReservation(dict(devices)))
        return self.reservations[-1]

    def create(self, node: str) -> str:
        self.actors.append(node)
        return f"actor {len(self.actors)} on {node}"

    def nodes(self, device: str) -> list[Node]:
        return [Node(name, "", 2, 2 - self.in_use(name)) for name in "abc"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    found = FakeCluster()
    monkeypatch.setattr(module, "reserve", found.reserve)
    monkeypatch.setattr(module, "nodes_of", found.nodes)
    monkeypatch.setattr(Crew, "_actor", lambda crew, node: found.create(node))
    monkeypatch.setattr("ray.kill", found.killed.append)
    return found


@pytest.fixture
def crew(cluster: FakeCluster) -> Crew:
    return Crew("cpu", ServerOptions(0.0))


def free(crew: Crew) -> dict[str, int]:
    return {node.id: node.free for node in crew.nodes()}


def test_all_devices_are_reserved_at_once(crew: Crew, cluster: FakeCluster) -> None:
    assert list(crew.seat("aab")) == ["a", "b"]
    assert [each.devices for each in cluster.reservations] == [{"a": 2, "b": 1}]


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


def test_a_node_that_was_left_counts_as_free_and_can_be_used_again(
    crew: Crew, cluster: FakeCluster
) -> None:
    crew.seat("ab")
    crew.seat("a")
    assert cluster.in_use("b") == 1
    assert free(crew) == {"a": 2, "b": 2, "c": 2}
    crew.seat("ab")
    assert len(cluster.reservations) == 1
    assert cluster.actors == ["a", "b", "b"]


def test_its_devices_are_free_once_no_actor_of_the_reservation_is_left(
    crew: Crew, cluster: FakeCluster
) -> None:
    crew.seat("ab")
    crew.seat("bc")
    crew.seat("c")
    assert [cluster.in_use(node) for node in "abc"] == [0, 0, 1]


def test_other_numbers_of_devices_are_reserved_anew(crew: Crew, cluster: FakeCluster) -> None:
    crew.seat("aabb")
    crew.seat("aab")
    assert [each.is_free for each in cluster.reservations] == [True, False]
    assert cluster.reservations[1].devices == {"a": 2, "b": 1}


def test_a_node_that_was_left_is_reserved_anew_for_another_number(
    crew: Crew, cluster: FakeCluster
) -> None:
    crew.seat("abb")
    crew.seat("a")
    crew.seat("ab")
    assert cluster.reservations[-1].devices == {"a": 1, "b": 1}
    assert cluster.in_use("b") == 1


def test_if_devices_are_taken_there_are_no_actors_on_new_nodes(
    crew: Crew, cluster: FakeCluster
) -> None:
    cluster.reserve({"b": 2}, "CPU")
    with pytest.raises(DevicesTakenError):
        crew.seat("ab")
    assert cluster.actors == []


def test_a_crew_that_is_closed_holds_nothing(crew: Crew, cluster: FakeCluster) -> None:
    actors: dict[str, Any] = crew.seat("ab")
    crew.close()
    assert sorted(cluster.killed) == sorted(actors.values())
    assert all(each.is_free for each in cluster.reservations)
