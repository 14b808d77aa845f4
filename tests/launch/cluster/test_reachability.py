"""Reachability of nodes, from the ports of their raylets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.ports import free_port

from trainload.launching.cluster import reachability
from trainload.launching.cluster.reachability import Reached, reach, unreachable


@pytest.fixture
def raylet() -> Iterator[int]:
    """Port on which something listens, and accepts nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port that does not respond, since its queue of connections is full."""
    monkeypatch.setattr(reachability, "_ANSWER_SECONDS", 0.05)
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = int(server.getsockname()[1])
        for _ in range(3):
            one = opened.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        yield port


def test_a_busy_node_answers(raylet: int) -> None:
    assert reach({"a": ("127.0.0.1", raylet)}) == {"a": Reached.ANSWERS}


def test_a_node_whose_raylet_has_ended_refuses() -> None:
    assert reach({"a": ("127.0.0.1", free_port())}) == {"a": Reached.REFUSES}


def test_a_node_that_is_cut_off_is_silent(silent: int) -> None:
    assert reach({"a": ("127.0.0.1", silent)}) == {"a": Reached.SILENT}


def test_nodes_that_ray_considers_dead_are_unreachable(
    raylet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {
            "NodeID": name,
            "Alive": alive,
            "NodeManagerAddress": "127.0.0.1",
            "NodeManagerPort": port,
        }
        for name, alive, port in (
            ("a", True, raylet),
            ("b", False, raylet),
            ("c", True, free_port()),
        )
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert unreachable(["a", "b", "c", "d"]) == {"b", "c", "d"}
