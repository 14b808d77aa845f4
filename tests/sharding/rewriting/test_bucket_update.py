"""The update of a rank's buckets, and computations that no rank can do alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.capture.jobs import Model, job
from tests.optimizers import optimizer_of
from tests.sharding.cases import captured, everything, flat_buckets, make_plan
from torch import Tensor, nn, optim

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import Recipe
from trainload.capture.tracing.trace import capture
from trainload.core.errors import PlanError
from trainload.sharding.analysis.liveness import held
from trainload.sharding.plans.buckets import make_buckets
from trainload.sharding.plans.strategies import Strategy
from trainload.sharding.rewriting.rank_update import UpdateStep
from trainload.sharding.rewriting.rewrite import rewrite

CPU = torch.device("cpu")
RANK = torch.tensor(0)


def recipe() -> Recipe:
    return captured()[2]


def inputs(step: UpdateStep, clip_seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(clip_seed)
    flats = flat_buckets(make_plan("single", 1), dict(captured()[0].state))
    params = [flats[p.bucket.name] for p in step.parts]
    return params, [torch.randn(p.shape, generator=generator) for p in params]


def test_the_traced_update_writes_in_place_what_the_call_returns() -> None:
    plan, updates = make_plan("single", 1), captured()[3]
    step = UpdateStep(plan, updates, recipe(), "train")
    params, gradients = inputs(step)
    divisor, rates = torch.tensor(2.0), torch.tensor([0.01, 0.02])
    with torch.no_grad():
        _, *made = UpdateStep(plan, updates, recipe(), "train", everything(plan))(
            divisor, rates, RANK, *params, *gradients
        )
        params, states = made[: len(params)], [s.clone() for s in made[len(params) :]]
        norm, *expected = step(divisor, rates, RANK, *params, *gradients, *states)
        (written,) = step.trace(CPU)(divisor, rates, RANK, *params, *gradients, *states)
    torch.testing.assert_close(written, norm)
    for found, value in zip([*params, *states], expected, strict=True):
        torch.testing.assert_close(found, value)


def test_new_values_do_not_gather_before_they_are_written() -> None:
    plan = make_plan("single", 1, bucket_bytes=1)
    step = UpdateStep(plan, captured()[3], recipe(), "train")
    largest = max(part.bucket.length for part in step.parts) * 4
    everything_new = sum(part.bucket.length * 4 * (1 + len(part.state)) for part in step.parts)
    assert held(step.trace(CPU)).peak < min(8 * largest, everything_new)


def test_the_gradient_is_clipped_to_its_global_norm() -> None:
    plan, updates = make_plan("single", 1), captured()[3]
    clipped, free = (
        UpdateStep(
            plan, updates, recipe().model_copy(update={"clip_norm": c}), "train", everything(plan)
        )
        for c in (0.5, None)
    )
    params, gradients = inputs(clipped)
    rates = torch.tensor([0.01, 0.02])
    with torch.no_grad():
        norm, *_ = free(torch.tensor(1.0), rates, RANK, *params, *gradients)
        scaled = [g * (0.5 / (norm + 1e-6)) for g in gradients]
        _, *expected = free(torch.tensor(1.0), rates, RANK, *params, *scaled)
        same_norm, *found = clipped(torch.tensor(1.0), rates, RANK, *params, *gradients)
    assert torch.equal(norm, same_norm)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("strategy", "reduced"), [("zero0", 0), ("zero1", 1), ("zero2", 1), ("zero3", 1), ("hybrid", 1)]
)
def test_the_norm_is_reduced_where_gradients_are_sharded(strategy: Strategy, reduced: int) -> None:
    plan = make_plan(strategy, 8)
    graph = UpdateStep(plan, captured()[3], recipe(), "train").trace(CPU).graph
    assert (
        sum(n.target is torch.ops._c10d_functional.all_reduce.default for n in graph.nodes)
        == reduced
    )


def test_an_update_of_whole_parameters_on_slices_is_refused() -> None:
    first, second = captured()[3]
    with pytest.raises(PlanError, match="needs whole parameters"):
        UpdateStep(make_plan("zero0", 8), [replace(first, shape=(2, 2)), second], recipe(), "train")


def test_a_group_without_an_update_is_refused() -> None:
    with pytest.raises(PlanError, match="no update"):
        UpdateStep(make_plan("zero0", 8), captured()[3][:1], recipe(), "train")


def test_a_count_that_depends_on_the_rows_is_refused_on_several_ranks() -> None:
    def tally(m: nn.Module, x: Tensor) -> Tensor:
        m.get_buffer("positive").add_((x > 0).sum())
        return x

    program = capture(job(Model(tally, positive=torch.zeros((), dtype=torch.int64))))
    graph = derive(program, "train", CPU)
    for world in (1, 2):
        buckets = make_buckets(
            program.parameters, {p.name: ("g",) for p in program.parameters}, [], world, 1
        )
        plan = make_plan("zero0", world).model_copy(update={"buckets": buckets})
        if world == 1:
            rewrite(graph, plan)
        else:
            with pytest.raises(PlanError, match="buffer positive"):
                rewrite(graph, plan)


def test_running_statistics_become_the_mean_over_ranks() -> None:
    program = capture(job(Model(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(8))))
    buckets = make_buckets(program.parameters, {}, [], 2, 1)
    graph = rewrite(
        derive(program, "train", CPU), make_plan("zero0", 2).model_copy(update={"buckets": buckets})
    )
    reduced = [
        n
        for n in graph.module.graph.nodes
        if n.target is torch.ops._c10d_functional.all_reduce.default
    ]
    # The totals, and the running mean and variance together. The count is equal on all ranks.
    assert sorted(n.meta["val"].numel() for n in reduced) == [2, 16]


def test_what_writes_to_a_view_of_a_new_value_comes_before_the_parameter_is_written() -> None:
    def clamp(optimizer: optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.05, 0.05)

    def clamped(model: nn.Module) -> optim.Optimizer:
        made = optim.SGD(model.parameters(), lr=0.1)
        made.register_step_post_hook(clamp)
        return made

    given = job(Model(), optimizer=clamped)
    program = capture(given)
    made, updates = optimizer_of(given, program)
    buckets = make_buckets(
        program.parameters, {p.name: (made.groups[0].name,) for p in program.parameters}, [], 1, 1
    )
    plan = make_plan("single", 1).model_copy(update={"buckets": buckets})
    step = UpdateStep(plan, updates, made, "train")
    params = [torch.ones(part.bucket.length) for part in step.parts]
    step.trace(CPU)(
        torch.tensor(1.0), torch.tensor([0.1]), RANK, *params, *map(torch.ones_like, params)
    )
    for param in params:
        torch.testing.assert_close(param, torch.full_like(param, 0.05))
