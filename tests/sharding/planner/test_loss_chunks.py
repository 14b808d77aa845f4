"""Plans with chunks of the loss: when the planner chooses them, and what the command accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner.device import DeviceProfile, Link
from trainload.sharding.planner.make_plan import make_plan
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.replan import replan
from trainload.sharding.planner.search import LOSS_CHUNKS, Choice, Wanted, evaluate, search
from trainload.sharding.plans.plan import Cluster, Plan

WIDTH, WORDS, ROWS = 16, 2048, 8
ONE = Cluster()


class Words(nn.Module):
    """(rows, 8) words -> (rows, 8, WORDS) logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.table(words)))
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), batch["words"].flatten())


def words_job(layers: int = 1) -> trainload.Job:
    torch.manual_seed(0)
    return trainload.Job(
        model=Words(layers),
        batch={"words": torch.randint(0, WORDS, (2, 8))},
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        steps=4,
        global_batch=ROWS,
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(words_job(), tmp_path_factory.mktemp("words") / "words.tl")


@pytest.fixture(scope="module")
def source(words: Package) -> Source:
    return Source(words)


def device(memory: int) -> DeviceProfile:
    link = Link(seconds=0.0, bytes_per_second=1e9)
    return DeviceProfile(
        name="d",
        kind="cpu",
        source="made up",
        memory_bytes=memory,
        flops={"float32": 1e9},
        memory_bytes_per_second=1e9,
        node=link,
        network=link,
    )


def peak(source: Source, loss_chunks: int) -> int:
    choice = Choice("single", loss_chunks=loss_chunks)
    return evaluate(source, ONE, device(2**40), choice, ROWS).costs.memory.peak


def test_chunks_are_chosen_where_nothing_else_fits(source: Source) -> None:
    whole, parts = peak(source, 1), peak(source, LOSS_CHUNKS)
    asked = Wanted(accumulate=1, recompute="job")
    best = search(source, ONE, device((whole + parts) // 2), asked).best
    assert best is not None
    assert best.choice.loss_chunks == best.plan.loss_chunks == LOSS_CHUNKS


def test_chunks_that_are_decided_already_stay(source: Source) -> None:
    found = search(source, ONE, device(2**40), Wanted(accumulate=1, loss_chunks=2))
    assert {c.plan.loss_chunks for c in found.candidates} == {2}


def test_chunks_are_not_tried_where_they_do_not_help(small_source: Source) -> None:
    found = search(small_source, ONE, device(2**40), Wanted(accumulate=1))
    assert {c.choice.loss_chunks for c in found.candidates} == {1}


def test_a_plan_for_other_nodes_has_the_chunks_of_the_first(words: Package) -> None:
    plan = make_plan(words, ONE, loss_chunks=4)
    assert replan(words, plan, Cluster(devices_per_node=2)).loss_chunks == 4


def test_the_command_writes_a_plan_with_chunks(words: Package, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert cli.run(["plan", str(words.path), "--loss-chunks", "4", "-o", str(path)]) == 0
    assert Plan.model_validate_json(path.read_bytes()).loss_chunks == 4


def test_chunks_of_a_loss_without_logits_are_rejected(small_source: Source) -> None:
    with pytest.raises(PlanError, match="cannot be computed in chunks"):
        make_plan(small_source, ONE, loss_chunks=2)
