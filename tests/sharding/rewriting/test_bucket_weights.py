"""Parameters that are converted before their use are converted with their bucket."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.capture.jobs import job
from tests.sharding import given
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.capture.job.definition import Job
from trainload.launching.node.determinism import deterministic
from trainload.sharding.plans.buckets import make_buckets
from trainload.sharding.plans.plan import Cluster, Estimate, Plan
from trainload.sharding.plans.strategies import Strategy
from trainload.sharding.rewriting.rewrite import RankGraph, rewrite, stored_length

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
CONVERT = torch.ops.aten._to_copy.default
WORLD = 2


class Layers(nn.Module):
    """Two layers under autocast, and a norm that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(torch.tanh(self.first(x)))
        result: Tensor = self.norm(x.float())
        return result


@functools.cache
def captured() -> tuple[Job, dict[str, Tensor], StepGraph]:
    torch.manual_seed(0)
    of = job(
        Layers(),
        batch={"x": torch.randn(4, 16)},
        loss=lambda m, b: m(b["x"]).square().mean(1).sin().mean(),
    )
    program, step = given.captured_step(of)
    return of, dict(program.state), step


@functools.cache
def rewritten(strategy: Strategy, apart: bool) -> tuple[Plan, RankGraph]:
    """Return a plan, with the norm in the bucket of the layers or apart, and a rank's graph."""
    _, state, step = captured()
    norms = {name: ("norms",) for name in state if apart and "norm" in name}
    parameters = [p for p in _program_parameters() if p.name in state]
    groups: dict[str, tuple[str, ...]] = {
        p.name: norms.get(p.name, ("layers",)) for p in parameters
    }
    world = 1 if strategy == "single" else WORLD
    plan = Plan(
        package="0" * 64,
        cluster=Cluster(devices_per_node=world),
        strategy=strategy,
        global_batch=4,
        buckets=make_buckets(parameters, groups, list(state), world, 10**6),
        estimate=Estimate(**dict.fromkeys(Estimate.model_fields, 0)),
    )
    return plan, rewrite(step, plan)


def _program_parameters() -> Any:
    return given.captured_step(captured()[0])[0].parameters


def of_dtype(graph: RankGraph, target: object, dtype: torch.dtype) -> list[Node]:
    return [
        node
        for node in graph.module.graph.nodes
        if node.target is target and node.meta["val"].dtype == dtype
    ]


def conversions(graph: RankGraph) -> list[Node]:
    """Return the conversions of buckets, or of parts of them."""
    inputs = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    buckets = {n for n, p in zip(inputs, graph.inputs, strict=True) if p.role is Role.BUCKET}
    return [n for n in of_dtype(graph, CONVERT, torch.bfloat16) if buckets.issuperset(_roots(n))]


def _roots(node: Node) -> list[Node]:
    sources = node.all_input_nodes
    return [node] if not sources else [root for each in sources for root in _roots(each)]


class _Alone(Interpreter):
    """Interprets a rank's graph with the buckets of all ranks at hand, and without the others."""

    def __init__(self, graph: RankGraph, buckets: dict[str, Tensor]) -> None:
        super().__init__(graph.module)
        self._buckets = buckets

    def run_node(self, n: Node) -> Any:
        if n.target is GATHER:
            (root,) = _roots(n)
            return self._buckets[root.name].to(n.meta["val"].dtype)
        if "reduce" in str(n.target):
            (own,) = n.all_input_nodes
            return self.env[own][: n.meta["val"].numel()]
        return super().run_node(n)


def results(plan: Plan, graph: RankGraph) -> list[Tensor]:
    of, state, _ = captured()
    buckets = {}
    for bucket in plan.buckets:
        flat = buckets[bucket.name] = torch.zeros(bucket.length)
        for slot in bucket.slots:
            flat[slot.offset : slot.offset + slot.length] = state[slot.parameter].flatten()
    values = [
        buckets[p.name][: stored_length(plan, next(b for b in plan.buckets if b.name == p.name))]
        if p.role is Role.BUCKET
        else given.value(p, of, state, {})
        for p in graph.inputs
    ]
    with torch.no_grad(), deterministic():
        found: list[Tensor] = _Alone(graph, buckets).run(*values)
    return found


def test_a_bucket_is_converted_once() -> None:
    _, graph = rewritten("single", False)
    assert len(conversions(graph)) == 1


def test_a_bucket_whose_parameters_are_all_converted_is_gathered_converted() -> None:
    plan, graph = rewritten("zero3", True)
    layers = next(b for b in plan.buckets if b.groups == ("layers",))
    assert [
        [_roots(node)[0].name for node in of_dtype(graph, GATHER, dtype)]
        for dtype in (torch.bfloat16, torch.float32)
    ] == [[layers.name] * 2, [b.name for b in plan.buckets if b is not layers] * 2]


def test_a_bucket_that_is_needed_in_both_dtypes_is_gathered_once_and_then_converted() -> None:
    plan, graph = rewritten("zero3", False)
    (bucket,) = plan.buckets
    nodes = list(graph.module.graph.nodes)
    middle = next(i for i, n in enumerate(nodes) if n.name == TANGENT)
    for part in (nodes[:middle], nodes[middle:]):
        gathers = [node for node in part if node.target is GATHER]
        assert [(node.meta["val"].dtype, _roots(node)[0].name) for node in gathers] == [
            (torch.float32, bucket.name)
        ]
    assert len(conversions(graph)) == 2


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_no_bit_of_a_gradient_changes(strategy: Strategy, apart: bool) -> None:
    (whole, whole_graph), (plan, graph) = rewritten("single", apart), rewritten(strategy, apart)
    for port, expected, found in zip(
        graph.outputs, results(whole, whole_graph), results(plan, graph), strict=True
    ):
        length = min(expected.numel(), found.numel())  # a bucket's end is padded
        assert torch.equal(expected[:length], found[:length]), port


def test_the_results_are_those_of_the_step_graph() -> None:
    of, state, step = captured()
    plan, graph = rewritten("single", False)
    with torch.no_grad(), deterministic():
        expected = step.module(*(given.value(p, of, state, {}) for p in step.inputs))
    gradients = {
        port.name: value
        for port, value in zip(step.outputs, expected, strict=True)
        if port.role is Role.GRADIENT
    }
    (flat,) = (
        value
        for port, value in zip(graph.outputs, results(plan, graph), strict=True)
        if port.role is Role.BUCKET_GRADIENT
    )
    for slot in plan.buckets[0].slots:
        part = flat[slot.offset : slot.offset + slot.length].view(slot.shape)
        assert torch.equal(part, gradients[slot.parameter])
