"""Mismatched collectives of ranks are found before they hang.

Every fault that is injected into a rank's graph is found.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.sharding.cases import captured, make_plan
from torch.fx import GraphModule, Node

from trainload.core.errors import PlanError
from trainload.sharding.analysis.collectives import Collective, check_agreement, collectives_of
from trainload.sharding.planner.simulate import check_meeting
from trainload.sharding.plans.plan import REPLICATE, SHARD, Plan
from trainload.sharding.plans.strategies import Strategy
from trainload.sharding.rewriting.rank_graphs import calls_of
from trainload.sharding.rewriting.rank_update import UpdateStep
from trainload.sharding.rewriting.rewrite import Phase, rewrite

C10D = torch.ops._c10d_functional
WORLD = 8


@functools.cache
def graph_of(strategy: Strategy) -> tuple[Plan, GraphModule]:
    plan = make_plan(strategy, WORLD)
    return plan, rewrite(captured()[1], plan).module


def collectives(graph: GraphModule) -> list[Node]:
    return [
        n
        for n in graph.graph.nodes
        if "c10d" in str(n.target) and n.target is not C10D.wait_tensor.default
    ]


def drop(graph: GraphModule, rng: random.Random) -> None:
    """Replace an all-reduce by its input."""
    node = rng.choice([n for n in collectives(graph) if n.target is C10D.all_reduce.default])
    (wait,) = node.users
    wait.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(wait)
    graph.graph.erase_node(node)


def reorder(graph: GraphModule, rng: random.Random) -> None:
    """Move a collective behind its neighbor."""
    found = collectives(graph)
    differ = [
        (a, b)
        for a, b in itertools.pairwise(found)
        if (a.target, a.meta["val"].shape) != (b.target, b.meta["val"].shape)
    ]
    first, second = rng.choice(
        [
            (a, b)
            for a, b in differ
            if all(u not in b.all_input_nodes for u in a.users) and after(a, b)
        ]
    )
    second.append(first)


def after(node: Node, other: Node) -> bool:
    """Return whether a node may be moved after another: no node between them uses it."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    return all(order[user] > order[other] for user in node.users)


def resize(graph: GraphModule, rng: random.Random) -> None:
    """Send twice as many elements."""
    node = rng.choice(collectives(graph))
    (source,) = node.all_input_nodes
    with graph.graph.inserting_before(node):
        longer = graph.graph.call_function(torch.ops.aten.cat.default, ([source, source],))
    longer.meta["val"] = torch.empty(
        2 * source.meta["val"].numel(), dtype=source.meta["val"].dtype, device="meta"
    )
    node.replace_input_with(source, longer)


def regroup(graph: GraphModule, rng: random.Random) -> None:
    """Use the other group: within the node instead of across nodes, or vice versa."""
    node = rng.choice([n for n in collectives(graph) if n.args[-1] in (SHARD, REPLICATE)])
    other = REPLICATE if node.args[-1] == SHARD else SHARD
    node.args = (*node.args[:-1], other)


def retype(graph: GraphModule, rng: random.Random) -> None:
    """Send another dtype."""
    node = rng.choice(collectives(graph))
    (source,) = node.all_input_nodes
    with graph.graph.inserting_before(node):
        cast = graph.graph.call_function(
            torch.ops.aten._to_copy.default, (source,), {"dtype": torch.float64}
        )
    cast.meta["val"] = source.meta["val"].to(torch.float64)
    node.replace_input_with(source, cast)


def repeat(graph: GraphModule, rng: random.Random) -> None:
    """Repeat a collective."""
    node = rng.choice(collectives(graph))
    with graph.graph.inserting_after(node):
        again = graph.graph.node_copy(node)
    with graph.graph.inserting_after(again):
        graph.graph.call_function(C10D.wait_tensor.default, (again,))


def reduce_otherwise(graph: GraphModule, rng: random.Random) -> None:
    """Reduce by the maximum instead of the sum."""
    node = rng.choice([n for n in collectives(graph) if "sum" in n.args])
    node.args = tuple("max" if a == "sum" else a for a in node.args)


def demand_sound(graphs: Sequence[GraphModule], plan: Plan) -> None:
    """Apply the check that workers make before they start."""
    found = {graph: calls_of({"train": graph}, plan) for graph in graphs}
    check_meeting([found[graph] for graph in graphs], plan)


def exchange(graph: GraphModule, rng: random.Random) -> None:
    """Swap two values of the same size that are sent: no rank hangs."""
    sources: dict[tuple[object, ...], list[Node]] = {}
    for node in collectives(graph):
        sources.setdefault((node.target, node.args[1:], node.meta["val"].shape), []).append(node)
    first, second = rng.choice(
        [pair for alike in sources.values() for pair in itertools.pairwise(alike)]
    )
    (one,), (other,) = first.all_input_nodes, second.all_input_nodes
    (
        second.append(first)
        if one is other
        else (
            first.replace_input_with(one, other),
            second.replace_input_with(other, one),
        )
    )


def compute_otherwise(graph: GraphModule, rng: random.Random) -> None:
    """Call the same collectives on another value."""
    node = rng.choice([n for n in graph.graph.nodes if n.target is torch.ops.aten.mul.Tensor])
    node.target = torch.ops.aten.add.Tensor


FAULTS: list[Callable[[GraphModule, random.Random], None]] = [
    *(drop, reorder, resize, regroup, retype, repeat, reduce_otherwise),
    *(exchange, compute_otherwise),
]


@pytest.mark.matrix(when=lambda strategy, phase: phase is Phase.ONLY or strategy == "hybrid")
@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3", "hybrid"])
@pytest.mark.parametrize("phase", list(Phase))
def test_every_rank_agrees_where_all_have_the_same_graph(strategy: Strategy, phase: Phase) -> None:
    plan = make_plan(strategy, WORLD)
    found = collectives_of(rewrite(captured()[1], plan, phase).module, plan.groups(), "train")
    assert found
    check_agreement([found] * WORLD, plan.groups(), "train")


def test_the_collectives_of_an_update_are_read_too() -> None:
    plan = make_plan("hybrid", WORLD)
    graph = UpdateStep(plan, captured()[3], captured()[2], "train").trace(torch.device("cpu"))
    assert collectives_of(graph, plan.groups(), "update") == (
        Collective("all_reduce", SHARD, "float32", 1, "sum"),
    )


@pytest.mark.matrix(kind=lambda fault: fault)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_in_one_rank_is_found(
    fault: Callable[[GraphModule, random.Random], None], seed: int
) -> None:
    plan, sound = graph_of("hybrid")
    rng = random.Random(seed)
    broken = copy.deepcopy(sound)
    fault(broken, rng)
    rank = rng.randrange(WORLD)
    with pytest.raises(PlanError) as caught:
        demand_sound([broken if r == rank else sound for r in range(WORLD)], plan)
    assert "train" in str(caught.value.where)


def test_ranks_that_differ_are_named_with_what_each_calls() -> None:
    plan, sound = graph_of("hybrid")
    right = collectives_of(sound, plan.groups(), "train")
    at = next(i for i, (one, following) in enumerate(itertools.pairwise(right)) if one != following)
    wrong = (*right[:at], *right[at + 1 :])
    with pytest.raises(PlanError, match="ranks 4 and 5 share") as caught:
        check_agreement([wrong if r == 5 else right for r in range(WORLD)], plan.groups(), "train")
    assert f"rank 4: {right[at]}" in str(caught.value)
    assert f"rank 5: {right[at + 1]}" in str(caught.value)


def test_a_collective_without_a_wait_is_refused() -> None:
    plan, sound = graph_of("zero3")
    broken = copy.deepcopy(sound)
    node = collectives(broken)[0]
    (wait,) = node.users
    wait.replace_all_uses_with(node)
    broken.graph.erase_node(wait)
    with pytest.raises(PlanError, match="nothing waits"):
        collectives_of(broken, plan.groups(), "train")


def test_a_group_of_another_size_is_refused() -> None:
    _, sound = graph_of("zero3")
    with pytest.raises(PlanError, match="the wrong size") as caught:
        collectives_of(sound, {"trainload.data": [[0, 1, 2, 3]]}, "train")
    assert "4 ranks" in str(caught.value)


def test_ranks_that_share_no_group_may_differ() -> None:
    groups = {"a": [[0, 1], [2, 3]]}
    first, second = (Collective("all_reduce", "a", "float32", 4, "sum"),), ()
    check_agreement([first, first, second, second], groups, "train")


def test_one_order_among_two_groups_is_demanded_of_those_who_share_both() -> None:
    groups = {"a": [[0, 1]], "b": [[0, 1]]}
    in_a, in_b = (Collective("all_reduce", name, "float32", 4, "sum") for name in "ab")
    with pytest.raises(PlanError, match="deadlock"):
        check_agreement([(in_a, in_b), (in_b, in_a)], groups, "train")


def test_sixteen_thousand_ranks_are_compared_at_once() -> None:
    plan, sound = graph_of("zero3")
    found = collectives_of(sound, plan.groups(), "train")
    large = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"nodes": 2048})})
    ranks = [found] * large.world_size
    check_agreement(ranks, large.groups(), "train")
    ranks[9999] = found[1:]
    with pytest.raises(PlanError, match="ranks 0 and 9999 share"):
        check_agreement(ranks, large.groups(), "train")
