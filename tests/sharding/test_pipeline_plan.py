"""Plans with a pipeline axis: meshes, manually edited entries, estimates, commands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PlanError
from trainload.launching.checkpoints.sharded_state import writes, written
from trainload.packaging.package import Package
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import DATA, PIPELINE, TENSOR, Plan, shared_group

EIGHT = trainload.Cluster(nodes=2, devices_per_node=4)


@pytest.fixture(scope="module")
def plan(gpt_source: Source) -> Plan:
    """A plan with two ranks on each axis."""
    return trainload.plan(gpt_source, EIGHT, "zero1", pipeline_ranks=2, tensor_ranks=2)


def test_axes_are_placed_by_the_speed_of_links(plan: Plan) -> None:
    assert plan.groups() == {
        TENSOR: ((0, 1), (2, 3), (4, 5), (6, 7)),
        DATA: ((0, 2), (1, 3), (4, 6), (5, 7)),
        PIPELINE: ((0, 4), (1, 5), (2, 6), (3, 7)),
        shared_group((0, 1)): ((0, 4), (1, 5), (2, 6), (3, 7)),
    }
    assert [plan.pipeline_index(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [plan.data_index(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_bucket_is_used_by_the_same_stages_throughout(plan: Plan) -> None:
    stages = {slot.parameter: bucket.stages for bucket in plan.buckets for slot in bucket.slots}
    assert stages["tokens.weight"] == (0, 1)
    assert {stages[name] for name in ("positions", "mix_in.weight", "scale")} == {(0,)}
    assert {stages[name] for name in ("widen.weight", "norms.2.bias")} == {(1,)}


def test_a_rank_holds_the_buckets_of_its_stages(plan: Plan) -> None:
    held = [{bucket.name for bucket in plan.held_buckets(index)} for index in range(2)]
    assert held[0] | held[1] == {bucket.name for bucket in plan.buckets}
    assert {bucket.name for bucket in plan.buckets if plan.holders(bucket) == (0, 1)} == held[
        0
    ] & held[1]


def test_every_element_of_a_checkpoint_has_one_writer(plan: Plan) -> None:
    assert sorted(plan.file_index(rank) for rank in range(8)) == list(range(8))
    for bucket in plan.buckets:
        lanes = {rank % 2 for rank in range(8)} if bucket.divided else {None}
        for lane in lanes:
            ranks = [
                r for r in range(8) if writes(plan, bucket, r) and (lane is None or r % 2 == lane)
            ]
            parts = sorted(written(plan, bucket, rank) for rank in ranks)
            assert [parts[0][0], *(stop for _, stop in parts)] == [
                *(start for start, _ in parts),
                bucket.length,
            ]


@pytest.mark.parametrize(("rows", "microbatches"), [(8, 4), (16, 4), (6, 3), (9, 3)])
def test_microbatches_are_up_to_twice_the_ranks(
    gpt_source: Source, rows: int, microbatches: int
) -> None:
    plan = trainload.plan(
        gpt_source, trainload.Cluster(devices_per_node=2), pipeline_ranks=2, global_batch=rows
    )
    assert plan.accumulate == microbatches


def test_a_rank_holds_less(gpt_source: Source) -> None:
    one = trainload.plan(gpt_source, trainload.Cluster(), "single").estimate
    piped = trainload.plan(
        gpt_source, trainload.Cluster(devices_per_node=2), pipeline_ranks=2
    ).estimate
    assert piped.parameter_bytes < one.parameter_bytes
    assert piped.communication_bytes_per_step > 0


def test_what_goes_between_stages_grows_with_the_rows(gpt_source: Source) -> None:
    cluster = trainload.Cluster(devices_per_node=2)
    sent = [
        trainload.plan(
            gpt_source, cluster, pipeline_ranks=2, accumulate=4, global_batch=rows
        ).estimate.communication_bytes_per_step
        for rows in (8, 16, 32)
    ]
    assert sent[2] - sent[1] == 2 * (sent[1] - sent[0]) > 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"pipeline_ranks": 3},
            (
                "pipeline_ranks: the pipeline axis does not divide the cluster (expected a divisor"
                " of the cluster's 8 devices, got 3)"
            ),
        ),
        (
            {"tensor_ranks": 4, "pipeline_ranks": 4},
            (
                "pipeline_ranks: the pipeline axis does not divide the cluster (expected a divisor"
                " of the 2 devices"
            ),
        ),
        ({"schedule": "zbv"}, "schedule: a schedule has no effect on a pipeline of one rank"),
        (
            {"pipeline_ranks": 2, "schedule": "zbv", "stages_per_rank": 1},
            "pipeline: the schedule zbv has two stages on each rank",
        ),
        (
            {"pipeline_ranks": 8, "stages_per_rank": 8},
            "pipeline: the graph has fewer places to cut than there are stages",
        ),
        (
            {"pipeline_ranks": 8, "accumulate": 3},
            "global_batch: the global batch cannot be split evenly",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    gpt_source: Source, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(PlanError) as caught:
        trainload.plan(
            gpt_source,
            EIGHT,
            None if "schedule" in options and "pipeline_ranks" not in options else "zero0",
            **options,
        )
    assert str(caught.value).startswith(line)


def edited(plan: Plan, **entries: Any) -> dict[str, Any]:
    found = plan.model_dump(mode="json")
    found["pipeline"] |= entries
    return found


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"ranks": 3}, "stage_ranks and order do not assign stages and actions to each of 3 ranks"),
        (
            {"stage_ranks": (0, 0)},
            "stage_ranks and order do not assign stages and actions to each of 2 ranks",
        ),
        ({"stage_ranks": (0, 1, 1)}, None),
        ({"buffers": {"mean": 2}}, "buffer mean is on an unknown stage"),
    ],
)
def test_an_edited_pipeline_is_refused(
    plan: Plan, gpt: Package, entries: dict[str, Any], reason: str | None
) -> None:
    if reason is not None:
        with pytest.raises(ValidationError, match=reason):
            Plan.model_validate(edited(plan, **entries))
    else:
        with pytest.raises(PlanError, match="a stage does not complete its work"):
            check_plan(Plan.model_validate(edited(plan, **entries)), gpt)


def test_an_edited_order_that_would_hang_is_refused(plan: Plan, gpt: Package) -> None:
    assert plan.pipeline is not None
    first, second = plan.pipeline.order
    changed = Plan.model_validate(edited(plan, order=[first[::-1], second]))
    with pytest.raises(PlanError, match="would deadlock"):
        check_plan(changed, gpt)


def test_a_bucket_on_a_stage_that_there_is_not_is_refused(plan: Plan) -> None:
    found = plan.model_dump(mode="json")
    found["buckets"][0]["stages"] = [5]
    with pytest.raises(ValidationError, match="is on stages"):
        Plan.model_validate(found)


def test_the_command_makes_the_plan(
    small_package: Package, small_source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--devices-per-node 4 --strategy zero0 --pipeline 2 --schedule zbv --json"
    assert cli.run(["plan", str(small_package.path), *options.split()]) == 0
    made = Plan.model_validate(json.loads(capsys.readouterr().out))
    assert made == trainload.plan(
        small_source,
        trainload.Cluster(devices_per_node=4),
        "zero0",
        pipeline_ranks=2,
        schedule="zbv",
    )
    assert (
        cli.run(["plan", str(small_package.path), "--devices-per-node", "2", "--pipeline", "2"])
        == 0
    )
    assert "2 ranks, 2 stages, 1f1b" in capsys.readouterr().out
