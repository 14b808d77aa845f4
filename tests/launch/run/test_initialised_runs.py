"""Runs that begin from the first values that the model's code gives its tensors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.launch.run.token_jobs import job_of, loss, losses, write_tokens
from tests.laws.runs import Run, train
from torch import Tensor, nn
from torch.nn import functional

import trainload
from trainload.cli import main as cli
from trainload.core.errors import IntegrityError, RequestError, WeightsError
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package

SMALL, LARGE = 8, 12
ROWS = 64
single = functools.partial(losses, strategy="single")


class Model(nn.Module):
    """Tied matrices, a table, a buffer that is not saved, and matrices of several initialisers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.embedding.weight.data[3] = 0.5
        layers = [nn.Linear(width, width) for _ in range(2)]
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=0.2)
        self.hidden = nn.ModuleList(layers)
        self.mixed = nn.Linear(width, width)
        nn.init.orthogonal_(self.mixed.weight)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight
        scale = 1.0 / 10.0 ** (torch.arange(width) / width)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("count", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) * self.scale * self.count
        for layer in self.hidden:
            hidden = functional.gelu(layer(hidden))
        found: Tensor = self.head(self.mixed(hidden))
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("initialised")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    path = folder / "rows.npz"
    return write_tokens(path, rows=ROWS, tokens=16)


@pytest.fixture(scope="module")
def abstract(folder: Path) -> Package:
    def large() -> trainload.Job:
        return job_of(Model(LARGE))

    def small() -> trainload.Job:
        return job_of(Model(SMALL))

    return trainload.freeze(large, folder / "abstract.tl", abstract=True, reduced=small)


@pytest.fixture(scope="module")
def concrete(folder: Path) -> Package:
    return trainload.freeze(lambda: job_of(Model(LARGE)), folder / "concrete.tl")


@pytest.fixture(scope="module")
def filled(abstract: Package, folder: Path) -> Package:
    """The abstract package with its first values."""
    return trainload.fill(abstract, "init", folder / "filled.tl")


def weights_of(package: Package) -> dict[str, Tensor]:
    return {name: package.weights.tensor(name) for name in package.weights.names()}


def different(a: Package, b: Package) -> list[str]:
    """Return the tensors with other bits."""
    theirs = weights_of(b)
    return [name for name, value in weights_of(a).items() if not torch.equal(value, theirs[name])]


def test_the_first_values_are_those_of_the_code(filled: Package) -> None:
    tensors = weights_of(filled)
    expected = 1.0 / 10.0 ** (torch.arange(LARGE) / LARGE)
    assert torch.equal(tensors["scale"], expected)
    assert tensors["count"] == 2.0
    assert torch.equal(tensors["embedding.weight"][3], torch.full((LARGE,), 0.5))
    product = tensors["mixed.weight"] @ tensors["mixed.weight"].t()
    torch.testing.assert_close(product, torch.eye(LARGE), atol=1e-5, rtol=0.0)
    assert 0 < float(tensors["hidden.0.bias"].abs().max()) <= LARGE**-0.5


def test_a_run_has_the_losses_of_a_package_with_these_weights(
    abstract: Package, filled: Package, data: Path, tmp_path: Path
) -> None:
    found = single(abstract, data, tmp_path / "init", weights_from="init")
    assert found == single(filled, data, tmp_path / "filled")


PLANS: dict[str, tuple[int, str, dict[str, int]]] = {
    "zero3": (2, "zero3", {}),
    "tensor": (2, "zero0", {"tensor_ranks": 2}),
    "pipeline": (2, "zero0", {"pipeline_ranks": 2, "accumulate": 2}),
    "four": (4, "zero3", {}),
}


@pytest.fixture(scope="module")
def divided(abstract: Package, data: Path, folder: Path) -> Path:
    """The folder of runs that keep their weights, since their learning rate is almost zero."""
    options = {
        "weights_from": "init",
        "compile": False,
        "steps": 1,
        "overrides": trainload.Overrides(lr=1e-30),
    }
    for world in (2, 4):
        runs = [
            Run(
                folder / name,
                abstract,
                trainload.plan(
                    abstract,
                    trainload.Cluster(devices_per_node=world),
                    strategy,  # type: ignore[arg-type]  # one of them
                    **more,  # type: ignore[arg-type]  # numbers of ranks
                ),
                data,
                {**options, "output": folder / f"{name}.tl"},
            )
            for name, (ranks, strategy, more) in PLANS.items()
            if ranks == world
        ]
        train(world, runs, folder)
    return folder


@pytest.mark.parametrize("plan", PLANS)
def test_the_bits_do_not_depend_on_the_plan(plan: str, divided: Path, filled: Package) -> None:
    assert different(trainload.open(divided / f"{plan}.tl"), filled) == []


def test_zero3s_ranks_compute_their_own_parts_only(divided: Path, filled: Package) -> None:
    parts = [e.data["bytes"] for e in read_events(divided / "zero3") if e.kind == "weights"]
    whole = sum(value.nbytes for value in weights_of(filled).values())
    buffers = sum(weights_of(filled)[name].nbytes for name in ("scale", "count"))
    assert len(parts) == 2
    assert sum(parts) <= whole + buffers


def test_another_seed_gives_other_values(
    abstract: Package, filled: Package, data: Path, tmp_path: Path
) -> None:
    other = trainload.fill(abstract, "init", tmp_path / "other.tl", seed=1)
    assert set(weights_of(filled)) - set(different(other, filled)) == {"scale", "count"}
    options: dict[str, Any] = {"overrides": trainload.Overrides(seed=1), "steps": 1}
    first = single(abstract, data, tmp_path / "init", weights_from="init", **options)
    assert first == single(other, data, tmp_path / "filled", **options)


def test_the_seed_is_recorded(abstract: Package, data: Path, tmp_path: Path) -> None:
    single(abstract, data, tmp_path / "run", weights_from="init", steps=1)
    given = read_spec(tmp_path / "run").given
    assert given is not None
    assert (given.kind, given.seed) == ("init", abstract.recipe.seed)
    (event,) = [e for e in read_events(tmp_path / "run") if e.kind == "weights"]
    assert event.data["source"] == f"init (seed {abstract.recipe.seed})"


def test_a_resumed_run_has_the_losses_of_one_that_was_not(
    abstract: Package, data: Path, tmp_path: Path
) -> None:
    whole = single(abstract, data, tmp_path / "whole", weights_from="init")
    single(abstract, data, tmp_path / "run", weights_from="init", steps=2)
    trainload.resume(tmp_path / "run", backend="local", steps=4)
    found = [event.data["loss"] for event in read_events(tmp_path / "run") if event.kind == "step"]
    assert found == whole


def test_it_is_evaluated(abstract: Package, filled: Package, data: Path) -> None:
    options: dict[str, Any] = {"backend": "local", "compile": False}
    plans = [trainload.plan(each, trainload.Cluster(), "single") for each in (abstract, filled)]
    found = trainload.evaluate(abstract, plans[0], data, weights_from="init", **options)
    assert found.loss == trainload.evaluate(filled, plans[1], data, **options).loss


def test_a_buffer_that_a_state_dict_lacks_is_computed(
    abstract: Package, filled: Package, data: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    state = Model(LARGE).state_dict()
    assert "scale" not in state
    del state["head.weight"]  # tied
    save_file(state, tmp_path / "model.safetensors")
    found = trainload.fill(abstract, tmp_path / "model.safetensors", tmp_path / "other.tl")
    assert different(found, filled) == sorted(state.keys() - {"count"}, key=list(state).index)
    source = str(tmp_path / "model.safetensors")
    first = single(abstract, data, tmp_path / "run", weights_from=source)
    assert first == single(found, data, tmp_path / "filled")


def test_a_package_with_values_begins_from_others(
    concrete: Package, data: Path, tmp_path: Path
) -> None:
    own = single(concrete, data, tmp_path / "own")
    first = single(concrete, data, tmp_path / "init", weights_from="init")
    assert own != first
    again = trainload.fill(concrete, "init", tmp_path / "filled.tl")
    assert first == single(again, data, tmp_path / "again")


def test_a_package_with_values_has_the_draws_of_one_without(
    concrete: Package, filled: Package, tmp_path: Path
) -> None:
    assert different(trainload.fill(concrete, "init", tmp_path / "filled.tl"), filled) == []


def test_the_output_of_a_run_can_be_initialised(
    abstract: Package, filled: Package, data: Path, tmp_path: Path
) -> None:
    single(abstract, data, tmp_path / "run", weights_from="init", output=tmp_path / "out.tl")
    trained = trainload.open(tmp_path / "out.tl")
    assert different(trained, filled)
    assert different(trainload.fill(trained, "init", tmp_path / "again.tl"), filled) == []


def test_adapters_begin_from_it_too(concrete: Package, data: Path, tmp_path: Path) -> None:
    overrides = trainload.Overrides(
        adapters=trainload.Adapters(rank=2, layers=("hidden.*.weight",))
    )
    of = trainload.fill(concrete, "init", tmp_path / "filled.tl")
    found = []
    for name, package, more in (
        ("init", concrete, {"weights_from": "init"}),
        ("filled", of, {}),
    ):
        plan = trainload.plan(overrides.apply(package), trainload.Cluster(), "single")
        trainload.launch(
            package,
            plan,
            data,
            run_dir=tmp_path / name,
            backend="local",
            compile=False,
            overrides=overrides,
            **more,  # type: ignore[arg-type]  # the source
        )
        events = read_events(tmp_path / name)
        found.append([event.data["loss"] for event in events if event.kind == "step"])
    assert found[0] == found[1]


def loaded(width: int) -> nn.Module:
    model = Model(width)
    model.big = nn.Parameter(torch.from_numpy(np.ones((600, 600), dtype=np.float32)))
    return model


@pytest.fixture(scope="module")
def partial(folder: Path) -> Package:
    def construct() -> trainload.Job:
        def with_big(model: Any, batch: dict[str, Tensor]) -> Tensor:
            found: Tensor = loss(model, batch) + model.big.square().mean()
            return found

        job = job_of(loaded(SMALL))
        return trainload.Job(
            model=job.model, batch=job.batch, loss=with_big, optimizer=job.optimizer, steps=2
        )

    return trainload.freeze(construct, folder / "partial.tl")


def test_values_from_a_file_cannot_be_initialised(partial: Package, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="1 of 10 parameters and buffers") as caught:
        trainload.fill(partial, "init", tmp_path / "filled.tl")
    assert "big: it was constructed elsewhere" in str(caught.value)
    assert "--partial-weights" in str(caught.value)


def test_they_are_kept_if_the_weights_may_be_partial(partial: Package, tmp_path: Path) -> None:
    found = trainload.fill(partial, "init", tmp_path / "filled.tl", partial=True)
    assert torch.equal(found.weights.tensor("big"), torch.ones(600, 600))
    assert "hidden.0.weight" in different(found, partial)


def test_a_package_of_a_constructed_job_says_what_it_lacks(tmp_path: Path) -> None:
    package = trainload.freeze(job_of(Model(SMALL)), tmp_path / "job.tl")
    with pytest.raises(WeightsError, match="no graphs of its model's first values") as caught:
        trainload.fill(package, "init", tmp_path / "filled.tl")
    assert "a function that constructs the model" in str(caught.value)


def test_a_seed_without_init_is_rejected(
    abstract: Package, filled: Package, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="no effect"):
        trainload.fill(abstract, filled.path, tmp_path / "filled.tl", seed=1)


def test_damaged_graphs_are_detected_before_the_run(
    abstract: Package, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "job.tl"
    trainload.fill(abstract, "init", path)
    file = path / "initialization.json"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content.replace(b"normal", b"cauchy", 1))
    with pytest.raises(IntegrityError, match=r"initialization\.json"):
        single(trainload.open(path), data, tmp_path / "run", weights_from="init")
    assert not (tmp_path / "run" / "run.json").exists()


def test_the_command_line_initialises(
    abstract: Package, filled: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fill", str(abstract.path), "--weights", "init", "-o", str(tmp_path / "f.tl")]
    assert cli.run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == filled.digest
    assert cli.run([*command[:-1], str(tmp_path / "g.tl"), "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] != filled.digest
