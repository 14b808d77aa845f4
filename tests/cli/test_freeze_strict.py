"""`trainload freeze --strict` and `--no-strict`, and the mode that a package records."""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.capture.jobs import Model, job
from torch import Tensor

import trainload
from trainload import passes
from trainload.capture.job.definition import Job
from trainload.capture.tracing.trace import capture
from trainload.cli import main as cli
from trainload.core.errors import CaptureError, JobError
from trainload.packaging.format.debug import read_debug
from trainload.packaging.package import Package

JOB = """
import builtins

import torch
import trainload
import trainload.freezing.load_job


class Flat(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).reshape(builtins.len(x), -1)


def made():
    return trainload.Job(
        model=Flat(),
        batch={"x": torch.randn(4, 8)},
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
"""


def flat() -> Job:
    def middle(model: Model, x: Tensor) -> Tensor:
        return x.reshape(builtins.len(x), -1) if model.training else x

    return job(Model(middle))


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "flat_job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return "flat_job.py:made"


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def fallen_back(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A package whose training graph was captured in strict mode as a fallback."""
    torch.manual_seed(1)
    return trainload.freeze(flat(), tmp_path_factory.mktemp("fallen") / "a.tl")


@pytest.fixture(scope="module")
def asked_for(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of a plain model, frozen with `strict=True`."""
    torch.manual_seed(1)
    return trainload.freeze(job(Model()), tmp_path_factory.mktemp("asked") / "a.tl", strict=True)


def test_a_package_says_which_mode_each_graph_was_captured_in(fallen_back: Package) -> None:
    tracing = read_debug(fallen_back.path, "capture")["tracing"]
    assert {name: how["mode"] for name, how in tracing.items()} == {
        "train": "strict",
        "eval": "non-strict",
    }
    assert "only one size in this model" in tracing["train"]["why"]


def test_inspect_prints_it(fallen_back: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(fallen_back.path)]) == 0
    text = told(capsys)
    assert "train: strict: the non-strict mode does not follow the model" in text
    assert "eval: non-strict: it follows the model" in text


def test_inspect_gives_it_as_json(fallen_back: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(fallen_back.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["captured"]["train"][0] == "strict"


def test_inspect_does_without_it(
    fallen_back: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(fallen_back.path, tmp_path / "a.tl")
    (tmp_path / "a.tl" / "debug" / "capture.json").write_text("{}")
    assert cli.run(["inspect", str(tmp_path / "a.tl")]) == 0
    assert "strict" not in told(capsys)


def test_a_pass_keeps_it(fallen_back: Package, tmp_path: Path) -> None:
    made = trainload.transform(
        fallen_back, [passes.eliminate_common_subexpressions], tmp_path / "b.tl"
    )
    assert read_debug(made.path, "capture") == read_debug(fallen_back.path, "capture")
    assert read_debug(made.path, "capture")["tracing"]["train"]["mode"] == "strict"


def test_what_was_asked_for_is_written_down(asked_for: Package) -> None:
    assert read_debug(asked_for.path, "capture")["tracing"]["train"] == {
        "mode": "strict",
        "why": "it was asked for",
    }


def test_both_modes_give_one_program_for_a_plain_model(asked_for: Package) -> None:
    torch.manual_seed(1)
    programs = (asked_for.program(), capture(job(Model()), strict=False))
    graphs = [
        [str(n.target) for n in p.graphs["train"].exported.graph.nodes if n.op == "call_function"]
        for p in programs
    ]
    assert graphs[0] == graphs[1]


@pytest.mark.slow  # law 5 checks this for packages in general
def test_a_strict_package_is_the_same_byte_for_byte(fallen_back: Package, tmp_path: Path) -> None:
    torch.manual_seed(1)
    assert trainload.freeze(flat(), tmp_path / "b.tl").digest == fallen_back.digest


@pytest.mark.slow  # the first tests freeze this way, and the next one with --no-strict
def test_the_command_line_freezes_by_itself(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["freeze", spec, "-o", "a.tl"]) == 0
    assert cli.run(["inspect", "a.tl"]) == 0
    assert "eval, train: strict:" in told(capsys)


def test_no_strict_refuses_on_the_command_line(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["freeze", spec, "-o", "a.tl", "--no-strict"]) == 2
    assert "only one size in this model" in capsys.readouterr().err


@pytest.mark.slow  # the option is passed on in the same way as --no-strict
def test_strict_on_the_command_line_is_written_down(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["freeze", spec, "-o", "a.tl", "--strict"]) == 0
    assert cli.run(["inspect", "a.tl"]) == 0
    assert "eval, train: strict: it was asked for" in told(capsys)


def test_strict_names_what_it_would_lose(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError,
        match="strict mode would lose part of the model: forward changes the grad mode",
    ):
        trainload.freeze(
            job(Model(lambda _, x: torch.no_grad()(torch.tanh)(x) + x)),
            tmp_path / "a.tl",
            strict=True,
        )


@pytest.mark.parametrize("strict", [True, False])
def test_an_abstract_package_has_no_choice_of_modes(strict: bool, tmp_path: Path) -> None:
    with pytest.raises(
        JobError, match=f"always captured in the non-strict mode.*got strict={strict}"
    ):
        trainload.freeze(flat(), tmp_path / "a.tl", abstract=True, reduced=flat(), strict=strict)
