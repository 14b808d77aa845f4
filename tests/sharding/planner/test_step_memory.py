"""Memory of an update by kind."""

from __future__ import annotations

from typing import Any

import pytest

import trainload
from trainload.packaging.package import Package
from trainload.sharding.planner.device import read
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.search import costs_of
from trainload.sharding.planner.simulate import simulate
from trainload.sharding.planner.step_memory import Kind, RankStep, rank_steps
from trainload.sharding.plans.plan import Cluster, Plan

PLANS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "zero0": {"strategy": "zero0", "devices": 2},
    "zero1, 4 microbatches": {"strategy": "zero1", "devices": 2, "accumulate": 4},
    "zero3, recomputed": {"strategy": "zero3", "devices": 2, "recompute": "full"},
    "tensor": {"strategy": "single", "devices": 2, "tensor_ranks": 2},
    "pipeline": {"strategy": "single", "devices": 2, "pipeline_ranks": 2, "accumulate": 4},
}


def made(package: Package, options: dict[str, Any]) -> Plan:
    options = dict(options)
    cluster = Cluster(devices_per_node=options.pop("devices", 1), device="cuda")
    return trainload.plan(package, cluster, options.pop("strategy"), **options)


def steps_of(source: Source, plan: Plan, device: str | None) -> tuple[RankStep, ...]:
    ranks = simulate(source, plan, training_only=True).ranks
    profile = None if device is None else read(device)
    return rank_steps(source.package, plan, ranks, profile)


@pytest.mark.parametrize("options", PLANS.values(), ids=list(PLANS))
def test_the_peak_is_that_of_the_plans_costs(gpt_source: Source, options: dict[str, Any]) -> None:
    plan = made(gpt_source.package, options)
    steps = steps_of(gpt_source, plan, "h100")
    expected = costs_of(gpt_source, plan, read("h100"))
    assert max(sum(step.peak) + step.reserved for step in steps) == expected.memory.peak


@pytest.mark.parametrize(
    "name", ["single", "zero1, 4 microbatches", "zero3, recomputed", "pipeline"]
)
def test_an_update_takes_the_time_of_the_plans_costs(gpt_source: Source, name: str) -> None:
    plan = made(gpt_source.package, PLANS[name])
    steps = steps_of(gpt_source, plan, "h100")
    length = max(step.length for step in steps)
    assert length == pytest.approx(costs_of(gpt_source, plan, read("h100")).time.seconds)


def test_without_a_profile_the_bytes_are_the_same(gpt_source: Source) -> None:
    plan = made(gpt_source.package, PLANS["zero3, recomputed"])
    timed, untimed = (steps_of(gpt_source, plan, device)[0] for device in ("h100", None))
    assert [call.held for call in timed.calls] == [call.held for call in untimed.calls]
    assert untimed.reserved == 0


def test_gathered_parameters_are_apart_from_activations(gpt_source: Source) -> None:
    gathered = {
        name: max(
            held[Kind.GATHERED]
            for call in steps_of(gpt_source, made(gpt_source.package, PLANS[name]), None)[0].calls
            for held in call.held
        )
        for name in ("zero0", "zero3, recomputed")
    }
    whole = made(gpt_source.package, PLANS["zero3, recomputed"]).estimate.gathered_bytes
    assert gathered["zero0"] == 0
    assert gathered["zero3, recomputed"] >= whole > 0


def test_gradients_are_apart_from_activations(gpt_source: Source) -> None:
    plan = made(gpt_source.package, PLANS["zero0"])
    (step,) = steps_of(gpt_source, plan, None)
    last = next(call for call in step.calls if call.work == "step").held[-1]
    assert last[Kind.GRADIENTS] >= plan.estimate.gradient_bytes > 0


def test_of_many_microbatches_the_first_and_the_last_are_here(gpt_source: Source) -> None:
    (step,) = steps_of(gpt_source, made(gpt_source.package, PLANS["zero1, 4 microbatches"]), None)
    assert [call.title for call in step.calls] == [
        "train, microbatch 1 of 4",
        "train, microbatch 4 of 4",
        "update",
    ]
    assert step.left_out == 2
