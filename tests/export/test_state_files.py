"""`trainload.export` of weights as a file or a distributed checkpoint, of a package or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from tests.export.jobs import Small, model_of
from tests.launch.tiny import Tiny, tiny_job, write_rows
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import trainload
from trainload.cli import main as cli
from trainload.core.errors import PackageError, RequestError
from trainload.packaging.package import Package

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to load in a single")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after 2, 4 and 5 updates, and its output."""
    folder = tmp_path_factory.mktemp("run")
    package = trainload.freeze(tiny_job(), folder / "tiny.tl")
    trainload.launch(
        package,
        trainload.plan(package, trainload.Cluster(), "single"),
        write_rows(folder / "rows.npz", 32),
        run_dir=folder / "run",
        output=folder / "trained.tl",
        steps=5,
        checkpoint_every=2,
        keep=9,
        backend="local",
        compile=False,
    )
    return folder / "run"


def loaded(checkpoint: Path, model: nn.Module) -> nn.Module:
    """Load a checkpoint as training code with torch.distributed.checkpoint does."""
    state = get_model_state_dict(model)
    load(state, checkpoint_id=checkpoint)
    set_model_state_dict(model, state)
    return model.eval()


def assert_equal_states(model: nn.Module, other: nn.Module) -> None:
    expected, found = model.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)


def test_a_distributed_checkpoint_gives_the_model_of_the_package(
    trained: Package, tmp_path: Path
) -> None:
    made = trainload.export(trained, tmp_path / "checkpoint", to="dcp")
    assert_equal_states(model_of(trained, Small()), loaded(made.path, Small()))


def test_a_file_gives_the_model_of_the_package(trained: Package, tmp_path: Path) -> None:
    made = trainload.export(trained, tmp_path / "model.safetensors", to="safetensors")
    model = Small()
    missing, unexpected = load_model(model, made.path)
    assert not missing
    assert not unexpected
    assert_equal_states(model_of(trained, Small()), model)
    assert (made.files, made.bytes) == (1, made.path.stat().st_size)


def test_one_module_can_be_exported_alone(trained: Package, tmp_path: Path) -> None:
    trainload.export(trained, tmp_path / "norm.safetensors", to="safetensors", part="norm")
    assert load_file(tmp_path / "norm.safetensors").keys() == Small().norm.state_dict().keys()


def test_the_newest_checkpoint_of_a_run_has_the_weights_of_its_output(
    run: Path, tmp_path: Path
) -> None:
    newest = trainload.export(run, tmp_path / "newest.safetensors", to="safetensors").path
    output = trainload.open(run.with_name("trained.tl"))
    own = trainload.export(output, tmp_path / "output.safetensors", to="safetensors").path
    assert newest.read_bytes() == own.read_bytes()


def test_any_checkpoint_of_a_run_is_exported(run: Path, tmp_path: Path) -> None:
    early = trainload.export(run, tmp_path / "early", to="dcp", step=2).path
    late = trainload.export(run, tmp_path / "late", to="dcp").path
    first, last = loaded(early, Tiny()), loaded(late, Tiny())
    assert not first.state_dict()["head.weight"].equal(last.state_dict()["head.weight"])


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_the_command_names_a_run_and_a_step(run: Path, tmp_path: Path, to: str) -> None:
    output = str(tmp_path / f"model.{to}")
    assert cli.run(["export", f"{run}@4", "--to", to, "--output", output]) == 0
    assert cli.run(["export", f"{run}@4", "--to", to, "--output", output]) == 2


def test_a_graph_of_a_run_computes_with_the_weights_of_the_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    batch: Any = {"tokens": torch.zeros(8, 5, dtype=torch.uint8)}
    losses = []
    for step in (2, 5):
        path = tmp_path / f"{step}.pt2"
        trainload.export(run, path, to="pt2", graph="eval", step=step)
        graph = torch.export.load(path).module()  # noqa: TID251  # this test has written it
        losses.append(float(graph(batch)[0]))
    assert losses[0] != losses[1]


def test_a_step_without_a_checkpoint_names_those_that_there_are(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no such checkpoint.*expected 2, 4, 5, got 3"):
        trainload.export(run, tmp_path / "model.safetensors", to="safetensors", step=3)


def test_a_package_has_no_steps(trained: Package, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="a package has no steps"):
        trainload.export(trained, tmp_path / "model.safetensors", to="safetensors", step=3)


def test_a_file_of_another_name_is_rejected(trained: Package, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"ends in \.safetensors"):
        trainload.export(trained, tmp_path / "model.bin", to="safetensors")
