"""Checks of the nodes of a cluster together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.manifest.nodes import Cluster, variables

import trainload
from trainload.cli import main as cli
from trainload.launching.api import doctor
from trainload.launching.doctor.between_nodes import (
    examine_clocks,
    examine_links,
    examine_ports,
    examine_versions,
    pairs_of,
)
from trainload.launching.doctor.check_results import CheckResult, DoctorReport, NodeReport
from trainload.launching.doctor.node_probe import BYTES

HERE = {"python": "3.11.7", "trainload": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"}


def test_a_node_with_another_torch_fails() -> None:
    other = NodeReport("b", "10.0.0.2", {**HERE, "torch": "2.12.0"}, ())
    found = examine_versions(HERE, [NodeReport("a", "10.0.0.1", HERE, ()), other])
    assert (found.status, found.found) == ("fails", "b torch 2.12.0")


@pytest.mark.parametrize(
    ("offsets", "status", "named"),
    [
        ({"a": 0.001, "b": -0.002}, "ok", ""),
        ({"a": 3.0, "b": 0.0}, "warning", "b and a"),
        ({"a": 100.0, "b": 100.0}, "fails", "this machine and a"),
    ],
)
def test_clocks_that_differ_are_found(offsets: dict[str, float], status: str, named: str) -> None:
    found = examine_clocks({node: (offset, 0.01) for node, offset in offsets.items()})
    assert found.status == status
    assert found.found.endswith(named)


def test_clocks_that_were_measured_over_a_slow_link_are_not_blamed() -> None:
    assert examine_clocks({"a": (1.5, 1.0), "b": (0.0, 1.0)}).status == "ok"


def test_a_closed_port_names_both_nodes() -> None:
    found = examine_ports({"a": {"b": "10.0.0.2:4000: timed out"}, "b": {}}, 2)
    assert (found.status, found.found) == ("fails", "a to 10.0.0.2:4000: timed out")


def test_a_slow_link_is_a_warning() -> None:
    fast = BYTES / 10e9
    sent = {("a", "b"): fast, ("b", "c"): 20 * fast, ("c", "a"): fast}
    _, links = examine_links("gloo", fast, sent)
    assert links.status == "warning"
    assert "from b to c, the slowest of 3" in links.found


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_every_rank_sends_once_and_has_one_partner_at_a_time(world: int) -> None:
    rounds = pairs_of(world)
    assert sorted(sender for pairs in rounds for sender in pairs) == list(range(world))
    assert all(
        receiver == (sender + 1) % world for pairs in rounds for sender, receiver in pairs.items()
    )
    for pairs in rounds:
        members = [*pairs, *pairs.values()]
        assert len(members) == len(set(members))


def test_a_report_with_a_warning_is_healthy() -> None:
    warning = CheckResult("a", "warning", "")
    assert DoctorReport((), (warning,)).healthy
    assert not DoctorReport((), (warning, CheckResult("b", "fails", ""))).healthy


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoctorReport]:
    """The report of a cluster of two nodes, whose second one has no compiler."""
    folder = tmp_path_factory.mktemp("ray")
    cluster = Cluster(folder, variables(folder))
    try:
        cluster.start_head()
        cluster.variables["CXX"] = "/nonexistent/g++"
        cluster.start_worker()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.variables.items():
                if name.startswith("RAY_"):
                    patch.setenv(name, value)
            yield trainload.doctor(f"127.0.0.1:{cluster.port}", store=str(folder / "store"))
    finally:
        cluster.close()


def statuses(checks: tuple[CheckResult, ...]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


@pytest.mark.ray
@pytest.mark.slow
def test_each_node_is_checked_in_its_own_environment(report: DoctorReport) -> None:
    found = sorted(statuses(node.checks)["compiler"] for node in report.nodes)
    assert found == ["ok", "warning"]
    assert all(statuses(node.checks)["store"] == "ok" for node in report.nodes)


@pytest.mark.ray
@pytest.mark.slow
def test_the_links_between_the_nodes_are_measured(report: DoctorReport) -> None:
    between = {check.name: check for check in report.between}
    assert between["versions"].status == between["clocks"].status == "ok"
    assert between["ports"].found == "2 connections between 2 nodes"
    assert "Gbit/s" in between["gloo all-reduce"].found
    assert "the slowest of 2" in between["gloo bandwidth"].found
    assert between["nccl"].status == "not applicable"
    assert report.healthy


def test_nodes_with_the_same_result_share_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray, compiler = CheckResult("ray", "ok", "2.60.0"), CheckResult("compiler", "ok", "g++ 12")
    none = CheckResult("compiler", "warning", "no g++", "a C++ compiler", "Install g++.")
    nodes = (
        NodeReport("a", "10.0.0.1", HERE, (ray, compiler)),
        NodeReport("b", "10.0.0.2", HERE, (ray, none)),
    )
    closed = CheckResult("ports", "fails", "a to b: timed out", "connections", "Open the ports.")
    monkeypatch.setattr(doctor, "doctor", lambda *_, **__: DoctorReport(nodes, (closed,)))
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["doctor", "--address", "a:6379"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [
        "check status found nodes",
        "ray ok 2.60.0 all",
        "compiler ok g++ 12 a",
        "compiler warning no g++ b",
        "ports fails a to b: timed out between",
    ]
    assert "compiler (b): expected a C++ compiler." in lines
    assert lines[-1] == "3 ok, 1 warning, 1 failed"
