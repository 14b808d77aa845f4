"""A simulation runs every rank of a plan without a cluster.

It rejects pipelines whose ranks would not match.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.analysis.collectives import Collective
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.simulate import Calls, Simulation, check_meeting, simulate
from trainload.sharding.plans.plan import PIPELINE, TENSOR, Plan

Messages = tuple[Collective, ...]
Rows = list[list[str]]


@pytest.fixture
def source(small_source: Source) -> Source:
    return small_source


@pytest.fixture(scope="module")
def piped(small_source: Source) -> Simulation:
    """Two stages, each with two tensor ranks and two data ranks."""
    cluster = trainload.Cluster(devices_per_node=8)
    return simulate(
        small_source,
        trainload.plan(
            small_source, cluster, "zero1", tensor_ranks=2, pipeline_ranks=2, accumulate=4
        ),
    )


def test_a_place_in_the_pipeline_has_graphs_of_its_own(piped: Simulation) -> None:
    assert [
        sorted({name.partition(".")[2] for name in graphs.ranks if name.startswith("train.")})
        for graphs in piped.ranks
    ] == [
        ["stage0.B", "stage0.F"],
        ["stage1.B", "stage1.F"],
    ]


def test_collectives_are_counted_by_group(piped: Simulation) -> None:
    counts = piped.counts()
    assert counts[TENSOR]["all_reduce"] > 0
    assert set(counts) <= set(piped.plan.groups())


def test_sixteen_thousand_ranks_meet(source: Source) -> None:
    cluster = trainload.Cluster(nodes=2048, devices_per_node=8)
    plan = trainload.plan(source, cluster, "hybrid", tensor_ranks=2, global_batch=8192)
    assert plan.world_size == 16384
    assert len(simulate(source, plan).ranks) == 1


def test_a_plan_for_another_package_is_refused(source: Source, piped: Simulation) -> None:
    with pytest.raises(PlanError, match="another package"):
        simulate(source, piped.plan.model_copy(update={"package": "0" * 64}))


# One of eight ranks has other messages, or another graph


def drop(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages))
    return messages[:at] + messages[at + 1 :]


def reorder(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages) - 1)
    return (*messages[:at], messages[at + 1], messages[at], *messages[at + 2 :])


def resize(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages))
    return (
        *messages[:at],
        dataclasses.replace(messages[at], elements=f"{messages[at].elements} x 2"),
        *messages[at + 1 :],
    )


def retype(messages: Messages, rng: random.Random) -> Messages:
    at = rng.randrange(len(messages))
    return (*messages[:at], dataclasses.replace(messages[at], dtype="float16"), *messages[at + 1 :])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", [drop, reorder, resize, retype], ids=lambda f: f.__name__)
def test_other_messages_on_one_rank_are_found(
    piped: Simulation, fault: Callable[[Messages, random.Random], Messages], seed: int
) -> None:
    rng, plan = random.Random(seed), piped.plan
    broken = rng.randrange(plan.world_size)

    def calls(rank: int) -> Calls:
        own = piped.calls[plan.pipeline_index(rank)]
        return (
            {**own, "train.messages": fault(tuple(own["train.messages"]), rng)}
            if rank == broken
            else own
        )

    with pytest.raises(PlanError, match=f"rank.* {broken}"):
        check_meeting([calls(rank) for rank in range(plan.world_size)], plan)


def test_messages_go_by_the_pipelines_group(piped: Simulation) -> None:
    assert {message.group for message in piped.calls[0]["train.messages"]} == {PIPELINE}


def test_a_rank_with_the_graphs_of_another_stage_is_found(piped: Simulation) -> None:
    plan = piped.plan
    everyones = [piped.calls[plan.pipeline_index(rank)] for rank in range(plan.world_size)]
    everyones[1] = piped.calls[1]
    with pytest.raises(PlanError, match="ranks 0 and 1 share"):
        check_meeting(everyones, plan)


# Orders of a pipeline after faulty manual edits


def drop_action(rows: Rows, rng: random.Random) -> None:
    rng.choice(rows).pop(rng.randrange(4))


def repeat_action(rows: Rows, rng: random.Random) -> None:
    row = rng.choice(rows)
    row.insert(rng.randrange(len(row)), rng.choice(row))


def give_away(rows: Rows, rng: random.Random) -> None:
    first, second = rng.sample(rows, 2)
    second.append(first.pop())


def backward_first(rows: Rows, rng: random.Random) -> None:
    row = rng.choice(rows)
    number = rng.randrange(4)
    forward, backward = (
        next(a for a in row if a[1] == part and a[2:] == str(number)) for part in "FB"
    )
    one, other = row.index(forward), row.index(backward)
    row[one], row[other] = backward, forward


def another_microbatch(rows: Rows, rng: random.Random) -> None:
    row = rng.choice(rows)
    row[rng.randrange(len(row))] = f"{row[0][0]}F9"


ORDER_FAULTS: list[Callable[[Rows, random.Random], None]] = [
    drop_action,
    repeat_action,
    give_away,
    backward_first,
    another_microbatch,
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", ORDER_FAULTS, ids=lambda f: f.__name__)
def test_an_order_that_would_not_end_is_refused(
    small_package: Package,
    piped: Simulation,
    fault: Callable[[Rows, random.Random], None],
    seed: int,
) -> None:
    plan = piped.plan.model_dump(mode="json")
    fault(plan["pipeline"]["order"], random.Random(seed))
    with pytest.raises((PlanError, ValidationError), match=r"pipeline|stage|order"):
        check_plan(Plan.model_validate(plan), small_package)


# The command


def test_the_command_says_what_it_went_through(
    small_package: Package, piped: Simulation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(piped.plan.model_dump_json())
    assert cli.run(["simulate", str(small_package.path), "--plan", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ranks"], told["collectives"]) == (8, piped.counts())
