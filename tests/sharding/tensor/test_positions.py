"""Ranks that share the positions of a row, alone or combined with parameters or experts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.grid.models import MODELS
from tests.ranks import on_ranks
from tests.selection import selected
from tests.sharding.given import captured_step, distances, job_of

import trainload
from trainload.autograd_trace.derivation.named_groups import bind_groups
from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.job.definition import Job
from trainload.core.errors import PlanError
from trainload.sharding.analysis.liveness import held
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import TENSOR, Shard
from trainload.sharding.plans.strategies import Divide
from trainload.sharding.tensor.partition import linked, partition
from trainload.sharding.tensor.positions import positions_of
from trainload.sharding.tensor.tensor_axis import divide

WORLD = 2
ASKED = "asked.json"


def job(name: str) -> Job:
    return MODELS[name].job() if name in MODELS else job_of(name)


CASES: list[tuple[str, Divide]] = [
    ("gpt", "sequence"),
    ("gpt", "context"),
    ("bart", "sequence"),
    ("sdpa with grouped queries", "context"),
    ("MultiheadAttention", "context"),
    ("vision transformer", "context"),
    ("masked", "context"),
    ("mixture of experts", "expert"),
    ("mixture of experts", "context"),
    ("norm first", "context"),
]


def rank_main(rank: int, world: int, folder: Path) -> None:
    bind_groups({TENSOR: (tuple(range(world)),)})
    for number in json.loads((folder / ASKED).read_text()):
        name, what = CASES[number]
        given = job(name)
        program, step = captured_step(given)
        axis = divide([step], world, (), None, what)
        made = partition(step, world, axis.shards, positions=True)
        far = distances(given, program, (step, made.step), axis.shards, rank, world)
        (folder / f"{number}-{rank}.json").write_text(json.dumps(far))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / ASKED).write_text(json.dumps(sorted(selected(request, "number"))))
    on_ranks(WORLD, rank_main, folder)
    return folder


@pytest.fixture(scope="module")
def gpt_step(gpt_source: Source) -> StepGraph:
    return gpt_source.steps(["train"])["train"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("number", range(len(CASES)), ids=[", ".join(case) for case in CASES])
def test_ranks_compute_what_one_would(ranks: Path, number: int, rank: int) -> None:
    far = json.loads((ranks / f"{number}-{rank}.json").read_text())
    assert max(far.values()) < 1e-5, far


def exchanged(step: StepGraph, shards: Mapping[str, Shard], least: int) -> Counter[str]:
    """Count the collectives with at least `least` elements."""
    return Counter(
        e.collective
        for e in partition(step, WORLD, shards, positions=True).exchanges
        if e.elements >= least
    )


@pytest.mark.slow
def test_a_context_gathers_keys_and_values_and_scatters_their_gradients(
    gpt_step: StepGraph,
) -> None:
    activation = 4 * 16 * 32
    found = exchanged(gpt_step, {}, activation // 2)
    assert found["reduce_scatter"] == 2
    assert found["all_gather"] == 4  # keys and values, in forward and again in backward


@pytest.mark.slow
def test_sequence_parallel_scatters_sums_where_the_tensor_axis_reduces_them(
    gpt_step: StepGraph,
) -> None:
    shards = divide([gpt_step], WORLD, (), None, "sequence").shards
    activation = 4 * 16 * 32
    assert exchanged(gpt_step, shards, activation // 2) == {"reduce_scatter": 6, "all_gather": 9}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sequence", "context"])
def test_less_is_held_where_positions_are_shared(gpt_step: StepGraph, what: Divide) -> None:
    shards = divide([gpt_step], WORLD, (), None, what).shards
    without, shared = (
        held(partition(gpt_step, WORLD, shards, positions=each).step.module).peak
        for each in (False, True)
    )
    assert shared < without


@pytest.mark.slow
def test_positions_are_those_of_the_data(gpt_step: StepGraph) -> None:
    found = positions_of(gpt_step, linked(gpt_step), WORLD)
    assert found is not None
    assert (found.factor.size, found.share, found.whole) == (16, 1.0, None)


@pytest.mark.slow
def test_experts_are_divided_and_nothing_else() -> None:
    step = captured_step(job("mixture of experts"))[1]
    assert set(divide([step], WORLD, (), None, "expert").shards) == {
        "block.feed_forward.up",
        "block.feed_forward.down",
    }


# Rejected divisions


def refusal(name: str, ranks: int, what: Divide) -> str:
    with pytest.raises(PlanError) as caught:
        divide([captured_step(job(name))[1]], ranks, (), None, what)
    return str(caught.value)


def test_positions_that_do_not_divide_are_refused(gpt_step: StepGraph) -> None:
    with pytest.raises(PlanError, match="no positions that this number of ranks can share"):
        divide([gpt_step], 5, (), None, "context")


@pytest.mark.slow
def test_a_recurrence_is_refused_as_a_context_by_what_needs_all_positions() -> None:
    told = refusal("LSTM", WORLD, "context")
    assert "most of the work cannot be divided by positions" in told
    assert "aten.mm.default" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cond", "a convolutional classifier"])
def test_features_of_the_data_are_no_positions(name: str) -> None:
    assert "no positions that this number of ranks can share" in refusal(name, WORLD, "context")


def test_a_graph_without_experts_is_refused_as_such(gpt_step: StepGraph) -> None:
    with pytest.raises(PlanError, match="no experts"):
        divide([gpt_step], WORLD, (), None, "expert")


def test_rules_do_not_go_with_a_context(gpt_step: StepGraph) -> None:
    with pytest.raises(PlanError, match="tensor rules only apply"):
        divide([gpt_step], WORLD, (), {"*": Shard(dim=0)}, "context")


def test_a_plan_of_one_rank_divides_nothing(gpt_source: Source) -> None:
    with pytest.raises(PlanError, match="a tensor axis of one rank divides nothing"):
        trainload.plan(gpt_source, trainload.Cluster(), divide="context")


def test_an_edited_plan_that_divides_parameters_among_a_context_is_refused(
    gpt_source: Source,
) -> None:
    plan: dict[str, Any] = trainload.plan(
        gpt_source, trainload.Cluster(devices_per_node=2), tensor_ranks=2
    ).model_dump(mode="json")
    with pytest.raises(ValueError, match="context, which divides no parameter"):
        trainload.Plan.model_validate(plan | {"divide": "context"})


# Work that each rank repeats


def test_a_plan_lists_what_each_rank_does_whole(gpt_step: StepGraph) -> None:
    found = {each.operator: each for each in divide([gpt_step], WORLD, (), None).replicated}
    norms = found["aten.native_layer_norm.default"]
    assert (norms.nodes, norms.operations) == (3, 0.0)
    assert norms.bytes > 2 * 3 * 4 * 16 * 32 * 4


@pytest.mark.slow
def test_with_positions_norms_are_no_longer_among_it(gpt_step: StepGraph) -> None:
    found = {each.operator for each in divide([gpt_step], WORLD, (), None, "sequence").replicated}
    assert "aten.native_layer_norm.default" not in found


@pytest.mark.slow
def test_control_flow_is_whole_with_the_work_inside_it() -> None:
    step = captured_step(job("cond"))[1]
    found = next(each for each in partition(step, WORLD, {}).replicated if "cond" in each.operator)
    assert found.operations > 0
