"""Plans: their degrees and process groups, their estimated costs, and rejected plans."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from tests.sharding.cases import make_plan

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import DATA, REPLICATE, SHARD, Estimate, Plan
from trainload.sharding.plans.strategies import STRATEGIES, Strategy

FOUR = trainload.Cluster(nodes=2, devices_per_node=2)


def estimate(package: Package, strategy: Strategy, accumulate: int = 1) -> Estimate:
    return trainload.plan(package, FOUR, strategy, accumulate=accumulate).estimate


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_the_ranks_of_one_copy_hold_each_share_once(strategy: Strategy) -> None:
    plan = make_plan(strategy, 4)
    for copy in range(plan.replicas):
        ranks = range(copy * plan.shard_degree, (copy + 1) * plan.shard_degree)
        assert [plan.shard_index(rank) for rank in ranks] == list(range(plan.shard_degree))


@pytest.mark.parametrize("world", [4, 6])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_every_part_is_written_by_one_rank_that_holds_it(strategy: Strategy, world: int) -> None:
    plan = make_plan(strategy, world)
    parts = [plan.part_index(rank) for rank in range(world)]
    assert sorted(parts) == list(range(world))
    assert [part * plan.shard_degree // world for part in parts] == [
        plan.shard_index(rank) for rank in range(world)
    ]


def test_hybrid_has_groups_within_and_across_copies() -> None:
    assert make_plan("hybrid", 4).groups() == {
        DATA: ((0, 1, 2, 3),),
        SHARD: ((0, 1), (2, 3)),
        REPLICATE: ((0, 2), (1, 3)),
    }


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
def test_other_strategies_have_one_group(strategy: Strategy) -> None:
    assert make_plan(strategy, 4).groups() == {DATA: ((0, 1, 2, 3),)}


def test_hybrid_shards_within_a_node(gpt_source: Source) -> None:
    plan = trainload.plan(gpt_source, trainload.Cluster(nodes=2, devices_per_node=4), "hybrid")
    assert (plan.shard_degree, plan.replicas) == (4, 2)


def test_zero2_keeps_no_whole_gradient_between_microbatches(gpt: Package) -> None:
    one, two, whole = estimate(gpt, "zero1", 2), estimate(gpt, "zero2", 2), estimate(gpt, "zero0")
    assert one.gradient_bytes - two.gradient_bytes == whole.gradient_bytes
    assert two.gradient_bytes * 4 == whole.gradient_bytes


def test_zero2_sends_gradients_with_every_microbatch(gpt: Package) -> None:
    sent = {n: estimate(gpt, "zero2", n).communication_bytes_per_step for n in (1, 2)}
    assert sent[1] == estimate(gpt, "zero1", 2).communication_bytes_per_step
    assert 2 * sent[2] == 3 * sent[1]


def test_hybrid_holds_more_than_zero3_and_less_than_a_replica(gpt: Package) -> None:
    hybrid, three, whole = estimate(gpt, "hybrid"), estimate(gpt, "zero3"), estimate(gpt, "zero0")
    assert hybrid.parameter_bytes == 2 * three.parameter_bytes == whole.parameter_bytes // 2
    assert hybrid.optimizer_bytes == 2 * three.optimizer_bytes == whole.optimizer_bytes // 2


def test_hybrid_sends_what_the_ring_says(gpt_source: Source) -> None:
    plan = trainload.plan(gpt_source, FOUR, "hybrid")
    sizes = [4 * b.length for b in plan.buckets]
    trained = [4 * b.length for b in plan.buckets if b.groups]
    within = sum(2 * size // 2 for size in sizes) + sum(size // 2 for size in trained)
    across = sum(2 * (size // 2) // 2 for size in trained)
    assert plan.estimate.communication_bytes_per_step == within + across


@pytest.mark.parametrize("ranks", [3, 1, 8])
def test_a_number_of_ranks_that_cannot_share_a_copy_is_refused(
    gpt_source: Source, ranks: int
) -> None:
    with pytest.raises(PlanError, match="cannot share one copy") as caught:
        trainload.plan(gpt_source, FOUR, "hybrid", shard_ranks=ranks)
    assert caught.value.where == "shard_ranks"
    assert "divisor of the cluster's 4 devices" in str(caught.value)


def test_shards_of_another_strategy_are_refused(gpt_source: Source) -> None:
    with pytest.raises(PlanError, match="requires the strategy hybrid"):
        trainload.plan(gpt_source, FOUR, "zero3", shard_ranks=2)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"shard_ranks": 3}, "does not divide the 4 ranks of the data axis"),
        ({"shard_ranks": 1}, "use the strategy zero0"),
        ({"shard_ranks": None}, "must be set with the strategy hybrid"),
        ({"strategy": "zero3"}, "must be set with the strategy hybrid"),
    ],
)
def test_a_plan_edited_by_hand_says_what_does_not_fit(
    changed: dict[str, object], told: str
) -> None:
    plan = make_plan("hybrid", 4).model_dump(mode="json")
    with pytest.raises(ValidationError, match=told):
        Plan.model_validate(plan | changed)


def test_a_plan_of_before_hybrid_is_read() -> None:
    plan = make_plan("zero3", 4)
    old = {
        key: value for key, value in plan.model_dump(mode="json").items() if key != "shard_ranks"
    }
    assert Plan.model_validate(old) == plan


def test_the_command_makes_the_plan_that_its_options_say(
    gpt: Package, gpt_source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "--devices-per-node 4 --strategy hybrid/2 --accumulate 2 --bucket-mib 0.01 --prefetch 3"
        " --json"
    )
    assert cli.run(["plan", str(gpt.path), *options.split()]) == 0
    cluster = trainload.Cluster(devices_per_node=4)
    expected = trainload.plan(
        gpt_source, cluster, "hybrid", shard_ranks=2, accumulate=2, bucket_bytes=10485, prefetch=3
    )
    assert Plan.model_validate_json(capsys.readouterr().out) == expected
    assert len(expected.buckets) > len(trainload.plan(gpt_source, cluster, "hybrid").buckets)
