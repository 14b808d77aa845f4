"""Checks of all nodes of a Ray cluster, and of the links between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from trainload.launching.cluster.nodes import NODE_LABEL, nodes_of
from trainload.launching.cluster.tasks import last_line, on_node
from trainload.launching.doctor.between_nodes import (
    examine_clocks,
    examine_links,
    examine_ports,
    examine_versions,
    pairs_of,
)
from trainload.launching.doctor.check_results import CheckResult, DoctorReport, NodeReport
from trainload.launching.doctor.installed_software import own_versions
from trainload.launching.doctor.node_probe import NodeProbe

_SECONDS = 240.0
"""Time of a node for its checks, among which are the import of torch and a compilation."""
_LINK_SECONDS = 180.0
_CLOCK_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class _Peer:
    """A node with its probe.

    Attributes:
        id: Ray's id of the node.
        name: its host name, with its address if several nodes have the same.
        address: its address in the cluster.
        probe: handle of its `NodeProbe`.
    """

    id: str
    name: str
    address: str
    probe: Any


def examine_cluster(store: str | None) -> DoctorReport:
    """Run the checks of every node of the cluster to which this process is connected.

    Args:
        store: path or URL of a storage that all nodes must reach; None for none.
    """
    peers = _peers()
    try:
        return _examine(peers, store)
    finally:
        for peer in peers:
            ray.kill(peer.probe)


def _peers() -> list[_Peer]:
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray has no types here
    names = [node["NodeManagerHostname"] for node in nodes]
    peers = []
    for node in sorted(nodes, key=lambda each: (each["NodeManagerHostname"], each["NodeID"])):
        name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        if names.count(name) > 1:
            name = f"{name} ({address}, {node['NodeID'][:6]})"
        probe = on_node(node["NodeID"])(NodeProbe).remote(address)
        peers.append(_Peer(node["NodeID"], name, address, probe))
    return peers


def _examine(peers: Sequence[_Peer], store: str | None) -> DoctorReport:
    has_peers = len({peer.address for peer in peers}) > 1
    calls = [peer.probe.examine.remote(store, has_peers) for peer in peers]
    deadline = time.monotonic() + _SECONDS
    reports, well = [], []
    for peer, call in zip(peers, calls, strict=True):
        try:
            report: NodeReport = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            reports.append(NodeReport(peer.name, peer.address, report.versions, report.checks))
            well.append(peer)
        except RayError as error:
            reports.append(NodeReport(peer.name, peer.address, {}, (_no_answer(error),)))
    between = [examine_versions(own_versions(), reports)]
    try:
        between += _between(well)
    except RayError as error:
        found, hint = last_line(str(error)), "Check whether a node was lost meanwhile: ray status."
        between.append(CheckResult("links", "fails", found, "answers of all nodes", hint))
    return DoctorReport(tuple(reports), tuple(between))


def _between(peers: Sequence[_Peer]) -> Iterator[CheckResult]:
    """Yield the checks of the links between nodes that respond.

    Raises:
        RayError: one does not respond any more.
    """
    if peers:
        yield examine_clocks({peer.name: _clock_offset(peer) for peer in peers})
    if len(peers) < 2:
        found = "one node" if peers else "no node responds"
        for name in ("ports", "gloo", "nccl"):
            yield CheckResult(name, "not applicable", found)
        return
    yield _examine_ports(peers)
    yield from _examine_group("gloo", peers)
    yield from _examine_nccl(peers)


def _no_answer(error: RayError) -> CheckResult:
    if isinstance(error, GetTimeoutError):
        found = f"no answer within {_SECONDS:g} s"
        return CheckResult("node", "fails", found, "an answer", "See what else runs on the node.")
    return CheckResult(
        "node",
        "fails",
        last_line(str(error)),
        "that the checks run there",
        "Install trainload on the node, in the environment in which Ray was started.",
    )


def _clock_offset(peer: _Peer) -> tuple[float, float]:
    """Return a node's clock minus this machine's, and the uncertainty, in seconds."""
    measured = []
    for _ in range(_CLOCK_ROUNDS):
        before = time.time()
        there: float = ray.get(peer.probe.now.remote(), timeout=_LINK_SECONDS)
        after = time.time()
        measured.append(((after - before) / 2, there - (before + after) / 2))
    uncertainty, offset = min(measured)
    return offset, uncertainty


def _examine_ports(peers: Sequence[_Peer]) -> CheckResult:
    ports = ray.get([peer.probe.listen.remote() for peer in peers], timeout=_LINK_SECONDS)
    places = {peer.name: (peer.address, port) for peer, port in zip(peers, ports, strict=True)}
    calls = [
        peer.probe.unreachable.remote(
            {name: place for name, place in places.items() if name != peer.name}
        )
        for peer in peers
    ]
    errors = ray.get(calls, timeout=_LINK_SECONDS)
    return examine_ports(
        {peer.name: error for peer, error in zip(peers, errors, strict=True)}, len(peers)
    )


def _examine_group(backend: str, peers: Sequence[_Peer]) -> tuple[CheckResult, ...]:
    """Measure the links of a process group with one rank on each node."""
    world, rounds = len(peers), pairs_of(len(peers))
    try:
        url = ray.get(peers[0].probe.free_url.remote(), timeout=_LINK_SECONDS)
        calls = [
            peer.probe.measure.remote(backend, url, rank, world, rounds)
            for rank, peer in enumerate(peers)
        ]
        results: list[Mapping[str, Any]] = ray.get(calls, timeout=_LINK_SECONDS)
    except RayError as error:
        timed_out = isinstance(error, GetTimeoutError)
        return (
            CheckResult(
                backend,
                "fails",
                f"no result within {_LINK_SECONDS:g} s" if timed_out else last_line(str(error)),
                f"a process group of one rank on each of {world} nodes",
                f"Set {backend.upper()}_SOCKET_IFNAME to the interface of the nodes; open ports.",
            ),
        )
    sent = {
        (peers[rank].name, peers[receiver].name): seconds
        for rank, result in enumerate(results)
        for receiver, seconds in result["sent"].items()
    }
    return examine_links(backend, max(result["all_reduce"] for result in results), sent)


def _examine_nccl(peers: Sequence[_Peer]) -> tuple[CheckResult, ...]:
    """Measure the links of the GPUs, if every node has a free one."""
    gpus = {node.id: node for node in nodes_of("cuda")}
    if not gpus:
        return (CheckResult("nccl", "not applicable", "no GPUs"),)
    with_free = [peer for peer in peers if peer.id in gpus and gpus[peer.id].free]
    if len(with_free) < 2:
        found = f"{len(with_free)} nodes with a free GPU"
        return (CheckResult("nccl", "not applicable", found, "two nodes with a free GPU"),)
    probes = [
        _Peer(
            peer.id,
            peer.name,
            peer.address,
            ray.remote(num_gpus=1, num_cpus=0, label_selector={NODE_LABEL: peer.id})(
                NodeProbe
            ).remote(peer.address),
        )
        for peer in with_free
    ]
    try:
        return _examine_group("nccl", probes)
    finally:
        for each in probes:
            ray.kill(each.probe)
