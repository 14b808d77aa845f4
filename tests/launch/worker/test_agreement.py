"""Two real ranks compare their collectives and data before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from tests.ranks import on_ranks
from tests.sharding.cases import make_plan

from trainload.core.errors import DataError, PlanError
from trainload.launching.worker.agreement import check_same_collectives, check_same_data
from trainload.sharding.analysis.collectives import Collective
from trainload.sharding.plans.plan import DATA

WORLD = 2
FIRST, SECOND = (Collective("all_reduce", DATA, "float32", size, "sum") for size in (4, 6))
ALIKE = {"train.only": (FIRST, SECOND), "eval": (FIRST,)}
OTHER = {"train.only": (FIRST, SECOND), "eval": (SECOND,)}


def compare(rank: int, world: int, folder: Path) -> None:
    plan = make_plan("zero0", world)
    assert dist.group.WORLD is not None
    check_same_collectives(ALIKE, plan, dist.group.WORLD)
    told = ""
    try:
        check_same_collectives(OTHER if rank else ALIKE, plan, dist.group.WORLD)
    except PlanError as error:
        told = str(error)
    (folder / f"{rank}.txt").write_text(told)


def compare_data(rank: int, world: int, folder: Path) -> None:
    assert dist.group.WORLD is not None
    check_same_data("same", f"node-{rank}", "rows.npz", dist.group.WORLD)
    try:
        check_same_data(f"rows-of-{rank}", f"node-{rank}", "rows.npz", dist.group.WORLD)
    except DataError as error:
        (folder / f"{rank}.txt").write_text(str(error))


def test_ranks_that_have_other_rows_are_told_which_nodes_they_are_on(tmp_path: Path) -> None:
    on_ranks(WORLD, compare_data, tmp_path)
    told = {(tmp_path / f"{rank}.txt").read_text() for rank in range(WORLD)}
    assert len(told) == 1
    assert (
        "the nodes do not have the same data (expected what rank 0 has on node node-0: rows-of-0,"
        " got different rows on node-1)" in told.pop()
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Message to each rank about differing graphs, after a comparison of equal ones."""
    folder = tmp_path_factory.mktemp("agreement")
    on_ranks(WORLD, compare, folder)
    return [(folder / f"{rank}.txt").read_text() for rank in range(WORLD)]


def test_both_ranks_are_told_the_same(told: list[str]) -> None:
    assert told[0] == told[1] != ""


def test_it_names_graph_ranks_and_collectives(told: list[str]) -> None:
    assert told[0].startswith(
        "eval, collective 0 of those that ranks 0 and 1 share: ranks would deadlock"
    )
    assert f"rank 0: {FIRST}" in told[0]
    assert f"rank 1: {SECOND}" in told[0]
