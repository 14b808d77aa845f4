"""Find out whether nodes of a cluster can be reached.

Ray itself reports after some 14 seconds that a node has died. The port of its raylet is closed at
once.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

import ray

_PARALLEL = 32
_ANSWER_SECONDS = 1.0
Address = tuple[str, int]


class Reached(StrEnum):
    """Outcome of an attempt to connect.

    ANSWERS: something listens. REFUSES: nothing listens, so the node's raylet has ended. SILENT: no
    response in time; the node may be down, or the network.
    """

    ANSWERS = "answers"
    REFUSES = "refuses"
    SILENT = "silent"


def raylets_of(nodes: Collection[str]) -> dict[str, Address]:
    """Return node id -> address of the node's raylet, for those of the nodes that Ray considers
    alive.
    """
    return {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
        if node["Alive"] and node["NodeID"] in nodes
    }


def reach(raylets: Mapping[str, Address]) -> dict[str, Reached]:
    """Connect to raylets in parallel, for at most a second each.

    Args:
        raylets: node id -> address of its raylet.

    Returns:
        Node id -> outcome.
    """
    if not raylets:
        return {}
    with ThreadPoolExecutor(min(_PARALLEL, len(raylets))) as pool:
        return dict(zip(raylets, pool.map(_reach_one, raylets.values()), strict=True))


def _reach_one(address: Address) -> Reached:
    try:
        socket.create_connection(address, _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return Reached.REFUSES
    except OSError:
        return Reached.SILENT
    return Reached.ANSWERS


def unreachable(nodes: Collection[str]) -> set[str]:
    """Return those of these nodes that Ray considers dead, or that do not respond."""
    answers = reach(raylets_of(nodes))
    return {node for node in nodes if answers.get(node) is not Reached.ANSWERS}
