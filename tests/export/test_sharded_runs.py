"""Exports of runs whose parameters are sharded over several ranks: bit for bit those of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.launch.tiny import LENGTH, WORDS, token_rows, write_rows
from tests.laws.runs import Run, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load

import trainload
from trainload.packaging.package import Package

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to load in a single")
CLUSTER = trainload.Cluster(devices_per_node=2)
PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"strategy": "zero3"},
    "zero1": {"strategy": "zero1"},
    "tensor": {"strategy": "single", "tensor_ranks": 2},
    "pipeline": {"strategy": "single", "pipeline_ranks": 2},
}


class Tied(nn.Module):
    """Model in bfloat16 with tied weights and buffers; tokens (rows, n) -> (rows, n, WORDS)."""

    scale: Tensor
    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.widen = nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("scale", torch.full((1, 1, 16), 0.5))
        self.to(torch.bfloat16)
        self.register_buffer("places", torch.arange(LENGTH - 1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens) * self.gain + self.widen.bias * self.scale
        hidden = hidden + self.places[:, None] * 0
        logits: Tensor = self.head(torch.relu(self.widen(hidden)))
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"].long()
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    job = trainload.Job(
        model=Tied(),
        batch={"tokens": torch.from_numpy(token_rows(4))},
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        steps=4,
        global_batch=8,
        seed=7,
    )
    return trainload.freeze(job, tmp_path_factory.mktemp("tied") / "tied.tl")


@pytest.fixture(
    scope="module",
    params=[
        "zero3",
        "tensor",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero1", "pipeline")),
    ],
)
def runs(
    request: pytest.FixtureRequest, package: Package, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of two runs: `long`, with checkpoints after 2 and 4 updates, and `short`, which
    ends after 2; with their outputs.
    """
    folder = tmp_path_factory.mktemp(request.param)
    plan = trainload.plan(package, CLUSTER, **PLANS[request.param])
    data = write_rows(folder / "rows.npz", 32)
    options = {"checkpoint_every": 2, "keep": 9}
    train(
        2,
        [
            Run(
                folder / name,
                package,
                plan,
                data,
                {**options, "steps": steps, "output": str(folder / f"{name}.tl")},
            )
            for name, steps in (("long", 4), ("short", 2))
        ],
        folder,
    )
    return folder


def state_of(package: Package) -> dict[str, Tensor]:
    """Return the state dict of a package's model, with both names of the tied weight."""
    names = Tied().state_dict().keys() - {"head.weight"}
    state = {name: package.weights.tensor(name) for name in names}
    return {**state, "head.weight": state["words.weight"]}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (value.dtype, value.shape), name
        assert other.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize(("step", "output"), [(2, "short"), (4, "long")])
def test_a_file_has_the_parameters_of_the_run(
    runs: Path, tmp_path: Path, step: int, output: str
) -> None:
    path = trainload.export(runs / "long", tmp_path / "a.safetensors", to="safetensors", step=step)
    expected = state_of(trainload.open(runs / f"{output}.tl"))
    assert_same_bits(
        {**(found := load_file(path.path)), "head.weight": found["words.weight"]}, expected
    )


@pytest.mark.parametrize(("step", "output"), [(2, "short"), (4, "long")])
def test_a_plain_state_dict_loads_a_distributed_checkpoint(
    runs: Path, tmp_path: Path, step: int, output: str
) -> None:
    path = trainload.export(runs / "long", tmp_path / "dcp", to="dcp", step=step).path
    state: dict[str, Any] = {n: torch.empty_like(v) for n, v in Tied().state_dict().items()}
    load(state, checkpoint_id=path)
    assert_same_bits(state, state_of(trainload.open(runs / f"{output}.tl")))


def test_the_two_checkpoints_differ(runs: Path) -> None:
    first, last = (trainload.open(runs / f"{name}.tl") for name in ("short", "long"))
    assert not first.weights.tensor("words.weight").equal(last.weights.tensor("words.weight"))
