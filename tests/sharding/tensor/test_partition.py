"""Partitioned step graphs on real ranks compute the outputs of the whole graph."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import on_ranks
from tests.selection import selected
from tests.sharding.given import FROZEN, captured, distances

import trainload
from trainload.autograd_trace.derivation.named_groups import bind_groups
from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import TENSOR, Shard
from trainload.sharding.tensor.choose import choose
from trainload.sharding.tensor.partition import Partitioned, partition

WORLD = 2
CASES = {
    "gpt": 6,
    "llama": 8,
    "gpt2": 8,
    "olmoe": 9,
    "bart": 30,
    "clip": 24,
    "sdpa with grouped queries": 2,
    "a convolutional classifier": 2,
    "MultiheadAttention": 3,
    "LSTM": 4,
    "moving": 3,
    "masked": 0,
}
"""Job -> the number of its parameters that two ranks divide."""
CONTEXTS = ("masked",)
"""Jobs whose ranks divide the positions of a row instead."""
ASKED, PACKAGE = "asked.json", "gpt"
"""Files with the cases for the ranks, and with the path of the GPT's package."""
SOME = ("gpt", "sdpa with grouped queries", "a convolutional classifier", "moving", *CONTEXTS)
small_jobs = pytest.mark.matrix(when=lambda case: case in SOME)


@functools.cache
def given(case: str) -> tuple[Job, Program, StepGraph, dict[str, Shard], Partitioned]:
    """Return a job, its program, its step graph, the division, and what its ranks call."""
    job, program, step = captured(case)
    shards = {} if case in CONTEXTS else choose([step], WORLD)
    return job, program, step, shards, partition(step, WORLD, shards, positions=case in CONTEXTS)


def asked(folder: Path) -> list[str]:
    """Return the selected cases."""
    found: list[str] = json.loads((folder / ASKED).read_text())
    return found


def prepare(folder: Path) -> None:
    FROZEN["gpt"] = Source(trainload.open((folder / PACKAGE).read_text()))
    for case in asked(folder):
        given(case)


def compared(case: str, rank: int, world: int) -> dict[str, Any]:
    """Run one case on one rank.

    Returns: the distance of each output from that of the whole graph, relative to the largest
    element, and counts of the exchanges.
    """
    job, program, step, shards, made = given(case)
    far = distances(job, program, (step, made.step), shards, rank, world)
    return {
        "far": far,
        "divided": len(shards),
        "exchanges": Counter(e.collective for e in made.exchanges),
    }


def rank_main(rank: int, world: int, folder: Path) -> None:
    bind_groups({TENSOR: (tuple(range(world)),)})
    for case in asked(folder):
        (folder / f"{case}-{rank}.json").write_text(json.dumps(compared(case, rank, world)))


@pytest.fixture(scope="module")
def ranks(
    gpt: Package, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / PACKAGE).write_text(str(gpt.path))
    (folder / ASKED).write_text(
        json.dumps([case for case in CASES if case in selected(request, "case")])
    )
    on_ranks(WORLD, rank_main, folder, prepare)
    return folder


@pytest.fixture(scope="module")
def step(gpt_source: Source) -> StepGraph:
    return gpt_source.steps(["train"])["train"]


@small_jobs
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_what_one_would(ranks: Path, case: str, rank: int) -> None:
    found = json.loads((ranks / f"{case}-{rank}.json").read_text())
    assert max(found["far"].values()) < 1e-4, found["far"]


@small_jobs
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_divided(ranks: Path, case: str) -> None:
    assert json.loads((ranks / f"{case}-0.json").read_text())["divided"] == CASES[case]


@small_jobs
@pytest.mark.parametrize(("case", "count"), [("gpt", 6), ("llama", 6)])
def test_a_block_is_exchanged_twice_forward_and_twice_backward(
    ranks: Path, case: str, count: int
) -> None:
    """The others are for the embedding and for the gradient of the vocabulary's input."""
    exchanges = json.loads((ranks / f"{case}-0.json").read_text())["exchanges"]
    assert exchanges == {"all_reduce": count + 1}  # the additional one is for the loss


def test_a_graph_that_divides_nothing_is_as_it_was(step: StepGraph) -> None:
    made = partition(step, WORLD, {})
    assert made.exchanges == ()
    assert made.step.inputs[:-1] == step.inputs
    assert not any("_c10d_functional" in str(node.target) for node in made.step.module.graph.nodes)


def test_a_parameter_may_be_divided_where_the_graph_needs_it_whole(step: StepGraph) -> None:
    made = partition(step, WORLD, {"norms.0.weight": Shard(dim=0)})
    assert ("parameter_norms_0_weight", "all_gather") in {
        (e.node, e.collective) for e in made.exchanges
    }


@pytest.mark.parametrize(
    "shard", [Shard(dim=2), Shard(dim=0, blocks=5), Shard(dim=0, blocks=96)], ids=str
)
def test_a_division_that_is_none_is_refused_by_the_parameter_s_name(
    step: StepGraph, shard: Shard
) -> None:
    with pytest.raises(
        PlanError,
        match=r"plan\.tensor_shards: mix_in\.weight: a parameter cannot be divided this way",
    ):
        partition(step, WORLD, {"mix_in.weight": shard})
