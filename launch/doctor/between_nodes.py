"""Verdicts on what was measured between the nodes of a cluster. This module does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainload.core.formatting import interval
from trainload.launching.doctor.check_results import CheckResult, NodeReport
from trainload.launching.doctor.node_probe import BYTES

_SKEW_SECONDS, _FAR_SECONDS = 1.0, 60.0
_SLOW_BYTES = 125_000_000
"""Bytes per second of a link of 1 Gbit/s."""
_MOST_NAMED = 4
_GIGABIT = 1e9 / 8


def pairs_of(world: int) -> list[dict[int, int]]:
    """Return rounds in which each rank sends to the next one once: sender -> receiver.

    In a round each rank has at most one partner.
    """
    if world == 2:
        return [{0: 1}, {1: 0}]
    even = {rank: rank + 1 for rank in range(0, world - 1, 2)}
    odd = {rank: rank + 1 for rank in range(1, world - 1, 2)}
    return [each for each in (even, odd, {world - 1: 0}) if each]


def examine_versions(here: Mapping[str, str], nodes: Sequence[NodeReport]) -> CheckResult:
    """Compare the versions of the nodes with those of the machine that launches.

    Args:
        here: versions of this machine.
        nodes: reports of the nodes.
    """
    others = {
        f"{node.node} {name} {version}"
        for node in nodes
        for name, version in node.versions.items()
        if version != here[name]
    }
    expected = ", ".join(f"{name} {version}" for name, version in here.items())
    if not others:
        return CheckResult("versions", "ok", expected)
    hint = "Install the same versions everywhere, such as by one image."
    return CheckResult(
        "versions", "fails", _list(sorted(others)), f"those of this machine: {expected}", hint
    )


def examine_clocks(offsets: Mapping[str, tuple[float, float]]) -> CheckResult:
    """Compare the clocks of the nodes.

    Args:
        offsets: node -> its clock minus this machine's, and the uncertainty of that, in seconds.
    """
    first = min(offsets, key=lambda node: offsets[node][0])
    last = max(offsets, key=lambda node: offsets[node][0])
    skew = offsets[last][0] - offsets[first][0]
    sure = skew - offsets[last][1] - offsets[first][1]
    furthest = max(offsets, key=lambda node: abs(offsets[node][0]))
    if abs(offsets[furthest][0]) > skew:  # this machine's clock is the one that differs
        skew, sure = abs(offsets[furthest][0]), abs(offsets[furthest][0]) - offsets[furthest][1]
        first, last = "this machine", furthest
    found = f"within {interval(max(skew, 1e-3))}"
    if sure <= _SKEW_SECONDS:
        return CheckResult("clocks", "ok", found)
    return CheckResult(
        "clocks",
        "fails" if sure > _FAR_SECONDS else "warning",
        f"{found}: {first} and {last}",
        f"within {_SKEW_SECONDS:g} s",
        "Synchronise the clocks (chrony, systemd-timesyncd).",
    )


def examine_ports(errors: Mapping[str, Mapping[str, str]], nodes: int) -> CheckResult:
    """Check that all nodes can connect to each other.

    Args:
        errors: node -> other node -> error of the connection.
        nodes: number of nodes.
    """
    failed = [f"{node} to {text}" for node, others in errors.items() for text in others.values()]
    if not failed:
        found = f"{nodes * (nodes - 1)} connections between {nodes} nodes"
        return CheckResult("ports", "ok", found)
    return CheckResult(
        "ports",
        "fails",
        _list(sorted(failed)),
        "that all nodes can connect to all ports of each other",
        "Open the ports between the nodes (security groups, network policies, firewalls).",
    )


def examine_links(
    backend: str, seconds: float, sent: Mapping[tuple[str, str], float]
) -> tuple[CheckResult, CheckResult]:
    """Compare the measured bandwidths with that of a slow link, and of links with each other.

    Args:
        backend: backend of the process group.
        seconds: time of an all-reduce.
        sent: sender and receiver -> time of a transfer.

    Returns:
        The checks of the all-reduce and of the links.
    """
    reduced = CheckResult(
        f"{backend} all-reduce",
        "ok",
        f"{interval(seconds)} for {BYTES // 2**20} MiB, {_bandwidth(seconds)}",
    )
    slowest = max(sent, key=lambda pair: sent[pair])
    fastest = min(sent.values())
    found = (
        f"{_bandwidth(sent[slowest])} from {slowest[0]} to {slowest[1]}, the slowest of {len(sent)}"
    )
    name, slow = f"{backend} bandwidth", BYTES / sent[slowest]
    if slow >= _SLOW_BYTES and sent[slowest] <= 4 * fastest:
        return reduced, CheckResult(name, "ok", found)
    return reduced, CheckResult(
        name,
        "warning",
        f"{found}; the fastest: {_bandwidth(fastest)}",
        f"at least {_SLOW_BYTES / _GIGABIT:g} Gbit/s, and similar links",
        "Check which interface is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and its speed.",
    )


def _bandwidth(seconds: float) -> str:
    return f"{BYTES / seconds / _GIGABIT:.3g} Gbit/s"


def _list(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return "; ".join(texts[:_MOST_NAMED]) + (f"; {more} more" if more > 0 else "")
