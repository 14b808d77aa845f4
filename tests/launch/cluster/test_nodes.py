"""Selection of the nodes for a plan's workers."""

from __future__ import annotations

from typing import Any

import pytest

import trainload
from trainload.core.errors import ClusterError
from trainload.launching.cluster.nodes import Node, check_seats, place_to_try, seats, unit_of
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan


def node(
    name: str, devices: int, free: int | None = None, kind: str = "", *, leaving: bool = False
) -> Node:
    return Node(name, kind, devices, devices if free is None else free, leaving)


def plan(tiny: Package, world: int, nodes: int = 1, **options: Any) -> Plan:
    return trainload.plan(
        tiny,
        trainload.Cluster(nodes=nodes, devices_per_node=world // nodes),
        global_batch=8,
        **options,
    )


def test_ranks_go_to_as_few_nodes_as_possible(tiny: Package) -> None:
    assert (
        seats(plan(tiny, 4, strategy="zero3"), [node("a", 2), node("b", 4), node("c", 2)])
        == ["b"] * 4
    )


def test_neighbouring_ranks_share_a_node(tiny: Package) -> None:
    assert seats(plan(tiny, 4, strategy="zero3"), [node("a", 1), node("b", 3)]) == [
        "b",
        "b",
        "b",
        "a",
    ]


def test_the_tensor_axis_stays_inside_a_node(tiny: Package) -> None:
    made = plan(tiny, 4, nodes=2, strategy="zero3", tensor_ranks=2)
    assert unit_of(made) == 2
    assert seats(made, [node("a", 3), node("b", 3)]) == ["a", "a", "b", "b"]
    assert seats(made, [node("a", 3), node("b", 1)]) is None


def test_devices_that_others_use_are_not_taken(tiny: Package) -> None:
    there = [node("a", 4, free=1), node("b", 2)]
    made = plan(tiny, 4, strategy="zero3")
    assert seats(made, there) is None
    assert seats(made, there, free=False) == ["a"] * 4


def test_a_node_that_will_be_gone_or_was_lost_is_not_taken(tiny: Package) -> None:
    made = plan(tiny, 2, strategy="zero3")
    assert seats(made, [node("a", 2, leaving=True), node("b", 2), node("c", 2)], without={"b"}) == [
        "c",
        "c",
    ]


def test_nodes_of_two_kinds_are_not_mixed(tiny: Package) -> None:
    made = plan(tiny, 4, strategy="zero3")
    assert seats(made, [node("a", 2, kind="H100"), node("b", 2, kind="A100")]) is None
    assert seats(
        made, [node("a", 3, kind="H100"), node("b", 2, kind="A100"), node("c", 2, kind="A100")]
    ) == ["b", "b", "c", "c"]


def test_too_few_devices_are_told_with_what_there_is(tiny: Package) -> None:
    with pytest.raises(
        ClusterError,
        match=(
            r"2 nodes with CPUs: .*expected 4 CPUs for 4 workers, got 3 CPUs.*Plan for at most 3"
            r" workers"
        ),
    ):
        check_seats(plan(tiny, 4, strategy="zero3"), [node("a", 2), node("b", 1)])


def test_nodes_that_do_not_fit_are_told_one_by_one(tiny: Package) -> None:
    with pytest.raises(ClusterError, match=r"expected 4 CPUs of one kind, got 2 H100, 2 A100"):
        check_seats(
            plan(tiny, 4, strategy="zero3"), [node("a", 2, kind="H100"), node("b", 2, kind="A100")]
        )


def test_a_cluster_whose_devices_are_taken_could_hold_the_plan(tiny: Package) -> None:
    check_seats(plan(tiny, 2, strategy="zero3"), [node("a", 2, free=0)])


def test_a_step_is_tried_out_where_a_run_would_begin(tiny: Package) -> None:
    made = plan(tiny, 4, strategy="zero3")
    assert place_to_try(made, made, [node("a", 2), node("b", 4), node("c", 2)]) == ("b", 4)


def test_a_step_is_tried_out_on_a_node_of_the_run_with_a_free_device(tiny: Package) -> None:
    made = plan(tiny, 4, strategy="zero3")
    assert place_to_try(made, made, [node("a", 2, free=0), node("b", 2, free=1)]) == ("b", 2)


def test_a_step_is_not_tried_out_where_all_devices_are_taken(tiny: Package) -> None:
    made = plan(tiny, 4, strategy="zero3")
    with pytest.raises(
        ClusterError,
        match=r"2 nodes with CPUs: .*expected 1 free CPU, got 0 of 2, 0 of 2.*Try again",
    ):
        place_to_try(made, made, [node("a", 2, free=0), node("b", 2, free=0)])
