"""A run with overrides trains like a job that was frozen with the changed settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.tiny import ROWS, WORDS, Tiny, loss, token_rows
from tests.laws.gpt import optimizer as gpt_optimizer
from tests.laws.gpt import schedule
from torch import nn

import trainload
from trainload.cli import main as cli
from trainload.core.errors import JobError
from trainload.launching.data.dataset import open_dataset
from trainload.launching.node.build_key import build_target
from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.format.entries import data_specs
from trainload.packaging.package import Package

STEPS = 6
Capture = pytest.CaptureFixture[str]


def trained(
    package: Package, data: Path, run_dir: Path, strategy: Any = "single", **overrides: Any
) -> list[float]:
    """Train a package with overrides, and return the losses."""
    changed = trainload.Overrides(**overrides)
    plan = trainload.plan(changed.apply(package, STEPS), trainload.Cluster(), strategy)
    options: dict[str, Any] = {
        "steps": STEPS,
        "compile": False,
        "backend": "local",
        "overrides": changed,
    }
    trainload.launch(
        package, plan, data, run_dir=run_dir, output=run_dir.with_suffix(".tl"), **options
    )
    return losses(read_events(run_dir))


class Scaled(Tiny):
    """The tiny model with a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WORDS,), 2.0), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


def job() -> trainload.Job:
    """Return a job with two parameter groups, always with the same initial weights.

    The schedule changes at every step, and the clipping takes effect.
    """
    torch.manual_seed(0)
    batch = {"tokens": torch.from_numpy(token_rows(4))}
    recipe: dict[str, Any] = {"steps": 100, "global_batch": ROWS, "clip_norm": 0.5, "seed": 7}
    return trainload.Job(
        model=Scaled(), batch=batch, loss=loss, optimizer=gpt_optimizer, schedule=schedule, **recipe
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(job(), tmp_path_factory.mktemp("scaled") / "job.tl")


def frozen(folder: Path, change: Callable[[trainload.Job], trainload.Job]) -> Package:
    """Freeze the job after a change."""
    return trainload.freeze(change(job()), folder / "changed.tl")


def weights(path: Path) -> dict[str, torch.Tensor]:
    package = trainload.open(path)
    return {
        spec.name: package.weights.tensor(spec.name)
        for spec in package.parameters
        if spec.alias_of is None
    }


@dataclasses.dataclass(frozen=True)
class Changed:
    """Losses with half the learning rate and a layer that is not trained.

    Attributes:
        expected: losses of a job that was frozen this way.
        losses: losses of a run with overrides.
        overrides: the overrides.
        pattern: pattern of the layer's parameters.
        output: output package of the run with overrides.
    """

    expected: list[float]
    losses: list[float]
    overrides: dict[str, Any]
    pattern: str
    output: Path


@pytest.fixture(scope="module")
def changed(package: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Changed:
    pattern = package.recipe.groups[0].parameters[0].split(".")[0] + ".*"

    def change(job: trainload.Job) -> trainload.Job:
        for name, parameter in job.model.named_parameters():
            if name.startswith(pattern[:-1]):
                parameter.requires_grad_(False)

        def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
            found = gpt_optimizer(model)
            for group in found.param_groups:
                group["lr"] *= 0.5
            return found

        return dataclasses.replace(job, optimizer=optimizer)

    folder = tmp_path_factory.mktemp("changed")
    expected = trained(frozen(folder, change), tiny_data, folder / "expected")
    peak = max(package.recipe.rates(step)[0] for step in range(package.recipe.steps))
    overrides = {"lr": 0.5 * peak, "frozen": (pattern,)}
    return Changed(
        expected,
        trained(package, tiny_data, folder / "set", **overrides),
        overrides,
        pattern,
        folder / "set.tl",
    )


def test_a_learning_rate_is_that_of_a_job_frozen_with_it(
    package: Package, changed: Changed, tiny_data: Path, tmp_path: Path
) -> None:
    assert changed.losses == pytest.approx(changed.expected, rel=1e-6)
    assert trained(
        package, tiny_data, tmp_path / "other", frozen=(changed.pattern,)
    ) != pytest.approx(changed.expected, rel=1e-6)


def test_a_schedule_is_tabulated_over_the_runs_steps(package: Package) -> None:
    changed = trainload.Overrides(lr=1e-2, schedule="linear:2").apply(package, 10).recipe
    rates = [changed.rates(step)[0] for step in range(10)]
    assert rates == pytest.approx(
        [1e-2 / 3, 2e-2 / 3, *(1e-2 * (1 - done / 8) for done in range(8))]
    )
    cosine = trainload.Overrides(lr=1e-2, schedule="cosine").apply(package, 4).recipe
    assert [cosine.rates(step)[0] for step in range(4)] == pytest.approx(
        [1e-2, 0.5e-2 * (1 + 0.5**0.5), 0.5e-2, 0.5e-2 * (1 - 0.5**0.5)]
    )


def test_frozen_parameters_stay_and_the_others_train_as_if_frozen_so(
    package: Package, changed: Changed
) -> None:
    assert changed.losses == pytest.approx(changed.expected, rel=1e-6)
    before, after = weights(package.path), weights(changed.output)
    stayed = {name for name in before if torch.equal(before[name], after[name])}
    untrained = {spec.name for spec in package.parameters if not spec.trainable}
    assert stayed == untrained | {name for name in before if name.startswith(changed.pattern[:-1])}


def test_the_trained_package_is_the_frozen_jobs_again(package: Package, changed: Changed) -> None:
    after = trainload.open(changed.output)
    assert after.recipe == package.recipe
    assert after.manifest.parameters == package.manifest.parameters
    assert after.manifest.parent == package.digest


def test_the_trained_package_says_how_it_was_trained(
    package: Package, tiny_data: Path, tmp_path: Path, capsys: Capture
) -> None:
    group = package.recipe.groups[0].name
    trained(
        package,
        tiny_data,
        tmp_path / "run",
        group_lr={group: 1e-4},
        frozen=("*bias*", "widen.*"),
        clip_norm=0.25,
    )
    after = trainload.open(tmp_path / "run.tl")
    training = after.manifest.training
    assert training is not None and training.steps == STEPS
    assert (
        training.data
        == open_dataset(tiny_data, data_specs(package.manifest, ""), tmp_path / "cache").fingerprint
    )
    told = {"clip_norm": 0.25, "frozen": ("*bias*", "widen.*"), f"lr.{group}": 1e-4}
    assert [(change.step, change.settings) for change in training.changed] == [(0, told)]
    assert after.manifest.program_digest == package.manifest.program_digest
    assert cli.run(["inspect", str(after.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"trained {STEPS} steps on data {training.data[:20]}" in shown
    assert f"settings clip_norm=0.25, frozen=*bias*,widen.*, lr.{group}=0.0001" in shown


@pytest.mark.slow
def test_a_package_that_was_trained_as_it_says_tells_no_settings(
    package: Package, tiny_data: Path, tmp_path: Path
) -> None:
    trained(package, tiny_data, tmp_path / "run")
    training = trainload.open(tmp_path / "run.tl").manifest.training
    assert training is not None and training.changed == ()


# test_changes.py compares a run that is clipped from its launch with a plain loop
@pytest.mark.slow
def test_clipping_is_changed(package: Package, tiny_data: Path, tmp_path: Path) -> None:
    def change(job: trainload.Job) -> trainload.Job:
        return dataclasses.replace(job, clip_norm=0.01)

    expected = trained(frozen(tmp_path, change), tiny_data, tmp_path / "expected")
    assert trained(package, tiny_data, tmp_path / "set", clip_norm=0.01) == pytest.approx(
        expected, rel=1e-6
    )


def test_what_no_graph_depends_on_is_compiled_once(package: Package) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    changes = (trainload.Overrides(), trainload.Overrides(lr=1e-5))
    keys = {
        build_target(change.apply(package, 7), plan, torch.device("cpu")).key for change in changes
    }
    assert len(keys) == 1
    assert (
        build_target(
            trainload.Overrides(clip_norm=0.25).apply(package), plan, torch.device("cpu")
        ).key
        not in keys
    )


def test_a_run_keeps_what_was_changed_and_says_so(changed: Changed) -> None:
    run_dir = changed.output.with_suffix("")
    assert read_spec(run_dir).overrides == trainload.Overrides(**changed.overrides)
    start = next(event for event in read_events(run_dir) if event.kind == "start")
    assert start.data["overrides"] == {"lr": changed.overrides["lr"], "frozen": [changed.pattern]}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"frozen": ("nothing.*",)}, r"no trained parameter matches 'nothing\.\*'"),
        ({"frozen": ("*",)}, "all parameters are frozen"),
        ({"group_lr": {"other": 0.1}}, "there is no parameter group 'other'"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "by its norm or by value, not both"),
    ],
)
def test_changes_that_do_not_fit_are_refused(
    package: Package, overrides: dict[str, Any], line: str
) -> None:
    with pytest.raises(JobError, match=line):
        trainload.Overrides(**overrides).apply(package)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("lr=fast", "--set lr=fast: Input should be a valid number"),
        ("lr=-1", "--set lr=-1: Input should be greater than 0"),
        (
            "schedule=steps",
            (
                "--set schedule=steps: must be one of constant, linear, cosine, optionally followed"
                " by :WARMUP"
            ),
        ),
        (
            "weight_decay=0",
            "weight_decay cannot be set at a launch: it is a constant of the captured update",
        ),
        ("dropout=0", "dropout cannot be set at a launch: it is part of the captured graph"),
        ("speed=2", "there is no setting speed; available: accumulate, adapters.alpha,"),
        ("keep=0", "--set keep=0: Input should be greater than or equal to 1"),
        ("lr", "--set lr: expected KEY=VALUE"),
    ],
)
def test_a_setting_that_is_wrong_is_told_with_what_there_is(
    package: Package, tiny_data: Path, given: str, line: str, capsys: Capture
) -> None:
    assert cli.run(["launch", str(package.path), "--data", str(tiny_data), "--set", given]) == 2
    assert line in capsys.readouterr().err


def test_the_command_line_changes_what_is_trained(
    package: Package, tiny_data: Path, tmp_path: Path, capsys: Capture
) -> None:
    settings = [
        "lr=1e-4",
        "schedule=cosine:2",
        "frozen=*bias*",
        "global_batch=4",
        "accumulate=2",
        "keep=1",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    arguments = [
        "launch",
        str(package.path),
        "--data",
        str(tiny_data),
        "--run-dir",
        str(tmp_path / "run"),
        "--steps",
        "4",
    ]
    assert cli.run([*arguments, "--backend", "local", "--no-compile", *options]) == 0, (
        capsys.readouterr().err
    )
    spec = read_spec(tmp_path / "run")
    assert (spec.overrides.lr, spec.overrides.schedule, spec.overrides.frozen) == (
        1e-4,
        "cosine:2",
        ("*bias*",),
    )
    assert (spec.plan.global_batch, spec.plan.accumulate, spec.keep) == (4, 2, 1)
