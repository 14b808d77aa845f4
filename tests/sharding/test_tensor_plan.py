"""Plans with a tensor axis: meshes, manually edited entries, estimates, commands."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.capture.jobs import job
from torch import nn

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import DATA, REPLICATE, SHARD, TENSOR, Plan, Shard

EIGHT = trainload.Cluster(nodes=2, devices_per_node=4)


@pytest.fixture(scope="module")
def plan(gpt_source: Source) -> Plan:
    """A plan with two tensor ranks and four data ranks, two of which share a copy."""
    return trainload.plan(gpt_source, EIGHT, "hybrid", tensor_ranks=2)


def test_neighbours_share_the_work_on_the_same_rows(plan: Plan) -> None:
    assert plan.groups() == {
        TENSOR: ((0, 1), (2, 3), (4, 5), (6, 7)),
        DATA: ((0, 2, 4, 6), (1, 3, 5, 7)),
        SHARD: ((0, 2), (4, 6), (1, 3), (5, 7)),
        REPLICATE: ((0, 4), (2, 6), (1, 5), (3, 7)),
    }
    assert plan.rows_per_call * 4 == plan.global_batch
    assert [plan.data_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_tensor_axis_alone_has_no_other_group(gpt_source: Source) -> None:
    alone = trainload.plan(gpt_source, trainload.Cluster(devices_per_node=2), tensor_ranks=2)
    assert (alone.strategy, alone.groups()) == ("single", {TENSOR: ((0, 1),)})


def test_every_file_of_a_checkpoint_has_one_writer(plan: Plan) -> None:
    assert sorted(plan.file_index(rank) for rank in range(8)) == list(range(8))


def test_a_rank_holds_less(gpt_source: Source, plan: Plan) -> None:
    without = trainload.plan(gpt_source, trainload.Cluster(nodes=2, devices_per_node=2), "hybrid")
    held, all_of_it = plan.estimate, without.estimate
    assert all_of_it.parameter_bytes // 2 < held.parameter_bytes < all_of_it.parameter_bytes
    assert held.optimizer_bytes < all_of_it.optimizer_bytes


def test_exchanges_grow_with_the_rows(gpt_source: Source) -> None:
    cluster = trainload.Cluster(devices_per_node=2)
    sent = [
        trainload.plan(
            gpt_source, cluster, tensor_ranks=2, global_batch=rows
        ).estimate.communication_bytes_per_step
        for rows in (8, 16, 32)
    ]
    assert sent[0] > 0
    assert sent[2] - sent[1] == 2 * (sent[1] - sent[0])


def test_divided_and_whole_parameters_are_in_buckets_of_their_own(plan: Plan) -> None:
    for bucket in plan.buckets:
        assert {slot.parameter in plan.tensor_shards for slot in bucket.slots} == {bucket.divided}


def test_a_rule_is_followed(gpt_source: Source) -> None:
    cluster = trainload.Cluster(devices_per_node=2)
    ruled = trainload.plan(
        gpt_source,
        cluster,
        tensor_ranks=2,
        tensor_rules={"mix_*": None, "narrow.weight": Shard(dim=1)},
    )
    assert set(ruled.tensor_shards) == {
        "narrow.weight",
        "tokens.weight",
        "widen.bias",
        "widen.weight",
    }


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"tensor_ranks": 3},
            (
                "tensor_ranks: the tensor axis does not divide the cluster (expected a divisor of"
                " the cluster's 8 devices, got 3)"
            ),
        ),
        (
            {"tensor_rules": {"*": None}},
            "tensor_rules: tensor rules have no effect on a tensor axis of one rank",
        ),
        (
            {"tensor_ranks": 2, "tensor_rules": {"*": None}},
            "tensor_ranks: the tensor axis has nothing to divide",
        ),
        (
            {"tensor_ranks": 2, "strategy": "single"},
            "strategy: the strategy single requires a data axis of one rank",
        ),
        (
            {"tensor_ranks": 2, "strategy": "hybrid", "shard_ranks": 8},
            "shard_ranks: this number of ranks cannot share one copy",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_planned_is_refused(
    gpt_source: Source, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(PlanError) as caught:
        trainload.plan(gpt_source, EIGHT, **options)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"tensor_ranks": 3}, "tensor_ranks is 3, which does not divide the cluster's 8 devices"),
        ({"tensor_ranks": 1}, "tensor_shards divides parameters, but tensor_ranks is 1"),
        ({"tensor_ranks": 8}, "which does not divide the 1 ranks of the data axis"),
        (
            {"strategy": "single", "shard_ranks": None},
            "the strategy is single, but the data axis has 4 ranks",
        ),
    ],
)
def test_degrees_edited_by_hand_say_what_does_not_fit(
    plan: Plan, changed: dict[str, object], line: str
) -> None:
    with pytest.raises(ValidationError, match=line):
        Plan.model_validate(plan.model_dump(mode="json") | changed)


@pytest.mark.parametrize(
    ("name", "shard", "line"),
    [
        (
            "nothing",
            Shard(dim=0),
            (
                "plan.tensor_shards: nothing: the tensor axis divides a parameter that the package"
                " lacks"
            ),
        ),
        (
            "narrow.weight",
            Shard(dim=7),
            "plan.tensor_shards: narrow.weight: the tensor axis cannot divide a parameter this way",
        ),
        (
            "narrow.weight",
            Shard(dim=1, blocks=5),
            "plan.tensor_shards: narrow.weight: the tensor axis cannot divide a parameter this way",
        ),
        ("norms.0.weight", Shard(dim=0), "plan.buckets: "),
    ],
)
def test_shards_edited_by_hand_say_what_does_not_fit(
    gpt: Package, plan: Plan, name: str, shard: Shard, line: str
) -> None:
    edited = plan.model_copy(update={"tensor_shards": {**plan.tensor_shards, name: shard}})
    with pytest.raises(PlanError) as caught:
        check_plan(edited, gpt)
    assert str(caught.value).startswith(line)


@pytest.fixture(scope="module")
def muon(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Two matrices whose optimizer needs them whole."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    made = job(model, optimizer=lambda m: torch.optim.Muon(m.parameters(), lr=0.01), global_batch=8)
    return trainload.freeze(made, tmp_path_factory.mktemp("muon") / "muon.tl")


def test_what_an_optimizer_needs_whole_is_not_divided(muon: Package) -> None:
    with pytest.raises(PlanError, match="has nothing to divide"):
        trainload.plan(muon, trainload.Cluster(devices_per_node=2), tensor_ranks=2)
    with pytest.raises(PlanError, match=r"0\.weight: a parameter's optimizer needs it whole"):
        trainload.plan(
            muon,
            trainload.Cluster(devices_per_node=2),
            tensor_ranks=2,
            tensor_rules={"0.*": Shard(dim=0)},
        )


def test_a_plan_edited_to_divide_what_an_optimizer_needs_whole_is_refused(muon: Package) -> None:
    before = trainload.plan(muon, trainload.Cluster(devices_per_node=2), "zero0")
    buckets = tuple(
        b.model_copy(
            update={
                "divided": True,
                "slots": tuple(s.model_copy(update=_half(s.shape)) for s in b.slots),
            }
        )
        for b in before.buckets
    )
    shards = {slot.parameter: Shard(dim=0) for b in buckets for slot in b.slots}
    with pytest.raises(
        PlanError, match="the tensor axis divides a parameter whose optimizer needs it whole"
    ):
        check_plan(
            before.model_copy(
                update={"tensor_ranks": 2, "tensor_shards": shards, "buckets": buckets}
            ),
            muon,
        )


def _half(shape: tuple[int, ...]) -> dict[str, Any]:
    own = Shard(dim=0).share_shape(shape, 2)
    return {"shape": own, "length": math.prod(own)}


def test_the_command_makes_the_plan_that_its_options_say(
    small_package: Package, small_source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = ["--tensor-rule", "ups.0.*=whole", "--tensor-rule", "ups.1.weight=0/2"]
    options = [
        "--devices-per-node",
        "2",
        "--tensor",
        "2",
        *rules,
        "-o",
        str(tmp_path / "plan.json"),
    ]
    assert cli.run(["plan", str(small_package.path), *options]) == 0
    capsys.readouterr()
    expected = trainload.plan(
        small_source,
        trainload.Cluster(devices_per_node=2),
        tensor_ranks=2,
        tensor_rules={"ups.0.*": None, "ups.1.weight": Shard(dim=0, blocks=2)},
    )
    assert Plan.model_validate(json.loads((tmp_path / "plan.json").read_text())) == expected


def test_the_command_says_where_an_axis_leaves_a_node(
    small_package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(
            [
                "plan",
                str(small_package.path),
                "--nodes",
                "2",
                "--devices-per-node",
                "1",
                "--tensor",
                "2/sequence",
            ]
        )
        == 0
    )
    told = " ".join(capsys.readouterr().out.split())
    assert "positions elsewhere; some are on several nodes, whose links are slow" in told


@pytest.mark.parametrize("text", ["0", "2/positions", "two", "2/"])
def test_a_tensor_axis_of_another_kind_is_refused(
    small_package: Package, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(["plan", str(small_package.path), "--devices-per-node", "2", "--tensor", text]) == 2
    )
    assert "/sequence, /context, /expert" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["mix_in.weight", "=0", "a=b", "a=0/0", "a=-1", "a=0/"])
def test_a_rule_that_is_none_is_refused(
    small_package: Package, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(
            [
                "plan",
                str(small_package.path),
                "--devices-per-node",
                "2",
                "--tensor",
                "2",
                "--tensor-rule",
                rule,
            ]
        )
        != 0
    )
    assert (
        "--tensor-rule: this is not a rule of the tensor axis (expected PATTERN=DIM,"
        f" PATTERN=DIM/BLOCKS, PATTERN=whole, got {rule})"
        in (capsys.readouterr().err.replace("\n", " "))
    )


def test_a_plan_of_before_the_tensor_axis_is_read(gpt_source: Source) -> None:
    before = trainload.plan(gpt_source, EIGHT, "zero3")
    old = before.model_dump(mode="json")
    for bucket in old["buckets"]:
        del bucket["divided"]
    del old["tensor_ranks"], old["tensor_shards"]
    assert Plan.model_validate(old) == before
