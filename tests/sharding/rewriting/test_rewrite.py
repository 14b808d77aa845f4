"""The nodes of a rewritten graph, and its results on one device."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.sharding.cases import (
    captured,
    flat_buckets,
    make_batch,
    make_plan,
    reference,
    run_rank,
    unflatten,
)
from torch.fx import Node

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.core.errors import PlanError
from trainload.sharding.plans.plan import REPLICATE, SHARD, Plan
from trainload.sharding.plans.strategies import STRATEGIES, Strategy
from trainload.sharding.rewriting.rewrite import (
    Phase,
    RankGraph,
    accumulated_length,
    rewrite,
    stored_length,
)

C10D = torch.ops._c10d_functional
GATHER = C10D.all_gather_into_tensor.default
SCATTER = C10D.reduce_scatter_tensor.default
WAIT = C10D.wait_tensor.default
REDUCE = C10D.all_reduce.default
WORLD = 8
CPU = torch.device("cpu")


@functools.cache
def rewritten(
    strategy: Strategy, phase: Phase = Phase.ONLY, prefetch: int = 1, world: int = WORLD
) -> tuple[Plan, RankGraph]:
    plan = make_plan(strategy, world, prefetch=prefetch)
    return plan, rewrite(captured()[1], plan, phase)


@functools.cache
def forward_only(name: str) -> StepGraph:
    return derive(captured()[0], name, CPU)


def calls(graph: RankGraph, target: object) -> list[Node]:
    return [n for n in graph.module.graph.nodes if n.target is target]


def source(node: Node) -> Node:
    """Return the operand of a collective."""
    (found,) = node.all_input_nodes
    return found


def gathers(graph: RankGraph) -> tuple[list[str], list[str]]:
    """Return the buckets gathered before and after the start of the backward part."""
    nodes = list(graph.module.graph.nodes)
    middle = next(i for i, n in enumerate(nodes) if n.name == TANGENT)
    forward = [source(n).name for n in nodes[:middle] if n.target is GATHER]
    backward = [source(n).name for n in nodes[middle:] if n.target is GATHER]
    return forward, backward


def trained(plan: Plan) -> int:
    return sum(bool(b.groups) for b in plan.buckets)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_gives_the_step_graphs_gradients(strategy: Strategy, accumulate: int) -> None:
    state = dict(captured()[0].state)
    plan = make_plan(strategy, 1, accumulate)
    gradients, totals = run_rank(plan, 0, state)
    expected, expected_totals = reference(state)
    got = unflatten(plan, gradients)
    torch.testing.assert_close(totals, expected_totals, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_device_needs_no_collectives(strategy: Strategy) -> None:
    _, graph = rewritten(strategy, world=1)
    assert [n for n in graph.module.graph.nodes if "c10d" in str(n.target)] == []


def test_zero0_reduces_each_trained_bucket_once() -> None:
    plan, graph = rewritten("zero0")
    assert len(calls(graph, REDUCE)) == trained(plan) + 1  # one is for the totals
    assert calls(graph, GATHER) == calls(graph, SCATTER) == []


def test_zero1_scatters_each_trained_bucket_once() -> None:
    plan, graph = rewritten("zero1")
    assert len(calls(graph, SCATTER)) == trained(plan)
    assert calls(graph, GATHER) == []


def test_zero3_scatters_each_trained_bucket_once() -> None:
    plan, graph = rewritten("zero3")
    assert len(calls(graph, SCATTER)) == trained(plan)


@pytest.mark.parametrize("strategy", ["zero0", "zero1"])
def test_gradients_stay_local_until_the_last_microbatch(strategy: Strategy) -> None:
    _, graph = rewritten(strategy, Phase.ACCUMULATE)
    assert len(calls(graph, REDUCE)) == 1  # for the totals
    assert calls(graph, SCATTER) == []


def test_zero3_scatters_in_every_microbatch() -> None:
    plan, graph = rewritten("zero3", Phase.ACCUMULATE)
    assert len(calls(graph, SCATTER)) == trained(plan)


def test_zero2_scatters_in_every_microbatch_and_gathers_nothing() -> None:
    plan, graph = rewritten("zero2", Phase.ACCUMULATE)
    assert len(calls(graph, SCATTER)) == trained(plan)
    assert calls(graph, GATHER) == []


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hybrid"])
def test_whole_gradients_are_let_go_while_others_are_made(
    strategy: Strategy, prefetch: int
) -> None:
    _, graph = rewritten(strategy, prefetch=prefetch)
    flying = most = 0
    for node in graph.module.graph.nodes:
        flying += node.target is SCATTER
        flying -= node.target is WAIT and source(node).target is SCATTER
        most = max(most, flying)
    assert most == prefetch + 1


def test_hybrid_communicates_parameters_among_neighbours_only() -> None:
    plan, graph = rewritten("hybrid")
    assert {n.args[1:] for n in calls(graph, GATHER)} == {(plan.shard_degree, SHARD)}
    assert {n.args[1:] for n in calls(graph, SCATTER)} == {("sum", plan.shard_degree, SHARD)}


@pytest.mark.parametrize(
    ("phase", "times"), [(Phase.ONLY, 1), (Phase.ACCUMULATE, 0), (Phase.SYNCHRONISE, 1)]
)
def test_hybrid_reduces_shares_of_gradients_across_copies_once_an_update(
    phase: Phase, times: int
) -> None:
    plan, graph = rewritten("hybrid", phase)
    reduced = [n for n in calls(graph, REDUCE) if n.args[2] == REPLICATE]
    assert len(reduced) == times * trained(plan)
    assert {n.meta["val"].numel() for n in reduced} <= {
        b.length // plan.shard_degree for b in plan.buckets
    }


def test_forward_and_backward_gather_apart_and_each_bucket_once() -> None:
    _, graph = rewritten("zero3")
    forward, backward = gathers(graph)
    assert len(set(forward)) == len(forward)
    assert len(set(backward)) == len(backward)
    assert set(forward) & set(backward)


def test_a_bucket_that_backward_does_not_need_is_gathered_in_forward_only() -> None:
    plan, graph = rewritten("zero3")
    bias = next(b.name for b in plan.buckets if b.slots[0].parameter == "down.bias")
    forward, backward = gathers(graph)
    assert bias in forward
    assert bias not in backward


def test_a_bucket_that_nothing_uses_is_not_gathered() -> None:
    plan, graph = rewritten("zero3")
    used = {source(n).name for n in calls(graph, GATHER)}
    stored = {n.name for n in graph.module.graph.nodes if n.op == "placeholder" and n.users}
    assert used == {b.name for b in plan.buckets} & stored


def test_backward_keeps_no_gathered_parameter_of_forward() -> None:
    _, graph = rewritten("zero3")
    nodes = list(graph.module.graph.nodes)
    middle = next(i for i, n in enumerate(nodes) if n.name == TANGENT)
    order = {n: i for i, n in enumerate(nodes)}
    waits = [
        n
        for n in nodes[:middle]
        if n.target is C10D.wait_tensor.default and source(n).target is GATHER
    ]
    views = [v for w in waits for v in w.users]
    users = [u for v in views for u in [v, *v.users]]
    assert users
    assert all(order[u] < middle for u in users)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_gather_starts_so_many_buckets_ahead(prefetch: int) -> None:
    _, graph = rewritten("zero3", prefetch=prefetch)
    nodes = list(graph.module.graph.nodes)
    middle = next(i for i, n in enumerate(nodes) if n.name == TANGENT)
    total = sum(n.target is GATHER for n in nodes[:middle])
    started = used = 0
    for node in nodes[:middle]:
        started += node.target is GATHER
        if node.target is C10D.wait_tensor.default and source(node).target is GATHER:
            used += 1
            # A linear layer uses two buckets at once here, those of its weight and bias, so one
            # more gather may have started.
            assert min(total, used + prefetch) <= started <= used + prefetch + 1


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
def test_a_reduction_starts_before_backward_is_over(strategy: Strategy) -> None:
    _, graph = rewritten(strategy)
    nodes = list(graph.module.graph.nodes)
    first = next(i for i, n in enumerate(nodes) if n.target in (REDUCE, SCATTER))
    waited = next(
        i
        for i, n in enumerate(nodes)
        if n.target is C10D.wait_tensor.default and source(n).target in (REDUCE, SCATTER)
    )
    between = [
        n
        for n in nodes[first:waited]
        if n.target in (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor)
    ]
    assert between


def test_no_rank_number_is_in_the_graph() -> None:
    plan, one = rewritten("zero3")
    other = rewrite(captured()[1], plan)
    assert str(one.module.graph) == str(other.module.graph)


@pytest.mark.parametrize("phase", list(Phase))
def test_inputs_have_the_lengths_that_the_plan_says(phase: Phase) -> None:
    plan, graph = rewritten("zero3", phase)
    lengths = {b.name: (stored_length(plan, b), accumulated_length(plan, b)) for b in plan.buckets}
    for node, port in zip(
        (n for n in graph.module.graph.nodes if n.op == "placeholder"), graph.inputs, strict=True
    ):
        if port.role in (Role.BUCKET, Role.BUCKET_GRADIENT):
            assert node.meta["val"].shape == (
                lengths[port.name][port.role is Role.BUCKET_GRADIENT],
            )


def test_every_node_has_a_shape() -> None:
    _, graph = rewritten("zero3", Phase.SYNCHRONISE)
    assert [
        n.name for n in graph.module.graph.nodes if n.op != "get_attr" and "val" not in n.meta
    ] == []


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("zero3", 1)])
def test_a_prediction_may_be_a_parameter_itself(strategy: Strategy, world: int) -> None:
    program = captured()[0]
    plan = make_plan(strategy, world)
    graph = rewrite(forward_only("predict"), plan)
    flats = flat_buckets(plan, dict(program.state))
    tokens = make_batch()["tokens"]
    given = {Role.BUCKET: flats, Role.BATCH: {"tokens": tokens}, Role.BUFFER: dict(program.state)}
    results = graph.module(*(given[p.role][p.name] for p in graph.inputs))
    found = {p.name: r for p, r in zip(graph.outputs, results, strict=True)}
    assert torch.equal(found["weight"], program.state["down.weight"])


def test_a_parameter_that_is_an_output_is_gathered_too() -> None:
    plan = make_plan("zero3", WORLD)
    graph = rewrite(forward_only("predict"), plan)
    down = next(b.name for b in plan.buckets if b.slots[0].parameter == "down.weight")
    assert down in {source(n).name for n in calls(graph, GATHER)}


def test_an_evaluation_graph_has_totals_and_no_gradients() -> None:
    graph = rewrite(forward_only("eval"), make_plan("zero3", WORLD))
    assert {p.role for p in graph.outputs} == {Role.TOTALS, Role.BUFFER}
    assert calls(graph, SCATTER) == []


def test_a_parameter_without_a_place_is_refused() -> None:
    plan = make_plan("zero0", WORLD)
    with pytest.raises(PlanError, match="no place"):
        rewrite(captured()[1], plan.model_copy(update={"buckets": plan.buckets[1:]}))
