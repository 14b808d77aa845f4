"""Changed settings of a resumed run apply from its last checkpoint on.

Changes that are not possible are rejected with the reason.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.launch.optimizer_jobs import STEPS, adam, eager, make_job
from tests.laws.runs import TOLERANCE, curve, difference

import trainload
from trainload.cli import main as cli
from trainload.core.errors import JobError, StorageError
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_spec import read_spec
from trainload.packaging.package import Package

HALF = STEPS // 2
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def half(package: Package, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of half the steps with a checkpoint at its end. Tests must not change it."""
    options: dict[str, Any] = {
        "steps": HALF,
        "compile": False,
        "backend": "local",
        "overrides": trainload.Overrides(clip_norm=5.0),
    }
    run_dir = tmp_path_factory.mktemp("half") / "run"
    trainload.launch(
        package,
        trainload.plan(package, trainload.Cluster(), "single"),
        rows,
        run_dir=run_dir,
        **options,
    )
    return run_dir


@pytest.fixture
def begun(half: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may continue."""
    return Path(shutil.copytree(half, tmp_path / "run"))


def peak(package: Package) -> float:
    return max(package.recipe.rates(step)[0] for step in range(package.recipe.steps))


def expected() -> list[float]:
    """Return the losses of the plain loop that the changed run must reproduce.

    The gradient's norm is clipped, and the learning rate is halved after half the steps.
    """
    job = make_job(adam)
    schedule: Any = job.schedule
    return eager(
        dataclasses.replace(
            job, clip_norm=5.0, schedule=lambda step: schedule(step) * (1.0 if step < HALF else 0.5)
        )
    ).losses


@pytest.mark.slow
def test_a_learning_rate_holds_from_the_last_checkpoint_on(package: Package, begun: Path) -> None:
    trainload.resume(
        begun, backend="local", steps=STEPS, overrides=trainload.Overrides(lr=0.5 * peak(package))
    )
    assert difference(expected(), curve(begun)) <= TOLERANCE
    assert (
        difference(eager(dataclasses.replace(make_job(adam), clip_norm=5.0)).losses, curve(begun))
        > 1e-3
    )


def test_the_run_keeps_what_was_changed_and_from_which_step(package: Package, begun: Path) -> None:
    trainload.resume(
        begun,
        backend="local",
        steps=HALF + 2,
        checkpoint_every=1,
        overrides=trainload.Overrides(schedule="linear"),
    )
    trainload.resume(
        begun, backend="local", steps=HALF + 3, overrides=trainload.Overrides(clip_norm=0.0)
    )
    spec = read_spec(begun)
    assert [(change.step, change.settings) for change in spec.changes] == [
        (0, {"clip_norm": 5.0}),
        (HALF, {"schedule": "linear", "steps": HALF + 2, "checkpoint_every": 1}),
        (HALF + 2, {"clip_norm": 0.0, "steps": HALF + 3}),
    ]
    assert spec.overrides == trainload.Overrides(schedule="linear", clip_norm=0.0)
    assert (spec.steps, spec.checkpoint_every) == (HALF + 3, 1)
    starts = [event.data for event in read_events(begun) if event.kind == "start"]
    assert [(start["step"], start["overrides"]) for start in starts] == [
        (0, {"clip_norm": 5.0}),
        (HALF, {"clip_norm": 5.0, "schedule": "linear"}),
        (HALF + 2, {"clip_norm": 0.0, "schedule": "linear"}),
    ]


@pytest.mark.slow
def test_the_trained_package_tells_the_changes_that_it_was_trained_by(
    package: Package, rows: Path, tmp_path: Path, capsys: Capture
) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    options: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "steps": HALF,
        "compile": False,
        "backend": "local",
    }
    trainload.launch(package, plan, rows, **options, output=tmp_path / "trained.tl")
    (tmp_path / "trained.tl").rename(tmp_path / "first.tl")
    trainload.resume(
        tmp_path / "run",
        backend="local",
        steps=STEPS,
        keep=1,
        overrides=trainload.Overrides(lr=1e-4),
    )
    training = trainload.open(tmp_path / "trained.tl").manifest.training
    assert training is not None and training.steps == STEPS
    assert [(change.step, change.settings) for change in training.changed] == [
        (HALF, {"lr": 1e-4, "steps": STEPS})
    ]
    assert cli.run(["inspect", str(tmp_path / "trained.tl")]) == 0
    assert f"from step {HALF}" in capsys.readouterr().out


def test_a_result_that_would_be_another_one_is_not_replaced(
    package: Package, rows: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    options: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "steps": 2,
        "compile": False,
        "backend": "local",
    }
    trainload.launch(package, plan, rows, **options, output=tmp_path / "trained.tl")
    with pytest.raises(
        StorageError,
        match=(
            "the run has already written its result, and the changed run would produce another one"
        ),
    ):
        trainload.resume(tmp_path / "run", backend="local", steps=4)
    assert read_spec(tmp_path / "run").steps == 2


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"adapters": trainload.Adapters(rank=2, layers=("first.weight",))},
            "adapters cannot be changed .* hold other parameters",
        ),
        ({"precision": "bf16"}, "precision cannot be changed in the middle of a run"),
        (
            {"frozen": ("norm.*",)},
            "frozen cannot be changed .* the optimizer state of the parameters trained so far",
        ),
        ({"seed": 5}, "seed cannot be changed .* it determines the rows of every step"),
    ],
)
def test_what_the_checkpoints_do_not_allow_is_refused(
    begun: Path, overrides: dict[str, Any], line: str
) -> None:
    before = (begun / "run.json").read_bytes()
    with pytest.raises(JobError, match=line):
        trainload.resume(begun, backend="local", overrides=trainload.Overrides(**overrides))
    assert (begun / "run.json").read_bytes() == before


def test_fewer_steps_than_were_done_are_refused(begun: Path) -> None:
    with pytest.raises(
        JobError,
        match=(
            rf"steps: the run has already completed this many steps \(expected more than {HALF},"
            r" got 3\)"
        ),
    ):
        trainload.resume(begun, backend="local", steps=3)


def test_a_change_that_does_not_fit_leaves_the_run_as_it_was(begun: Path) -> None:
    before = (begun / "run.json").read_bytes()
    with pytest.raises(JobError, match="there is no parameter group 'other'"):
        trainload.resume(
            begun,
            backend="local",
            steps=STEPS,
            overrides=trainload.Overrides(group_lr={"other": 0.1}),
        )
    assert (begun / "run.json").read_bytes() == before


def test_the_command_line_changes_a_run(package: Package, begun: Path, capsys: Capture) -> None:
    settings = [f"lr={0.5 * peak(package)!r}", f"steps={STEPS}", "checkpoint_every=2", "keep=3"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert cli.run(["resume", str(begun), "--backend", "local", *options]) == 0, (
        capsys.readouterr().err
    )
    assert difference(expected(), curve(begun)) <= TOLERANCE
    assert sorted(path.name for path in (begun / "checkpoints").glob("step-*")) == [
        f"step-{step:08}" for step in (8, 10, 12)
    ]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "seed=5",
            "seed cannot be changed in the middle of a run: it determines the rows of every step",
        ),
        ("global_batch=16", "global_batch cannot be changed in the middle of a run"),
        (
            "accumulate=2",
            "accumulate cannot be changed in the middle of a run: it is part of the plan",
        ),
        ("precision=bf16", "precision cannot be changed in the middle of a run"),
        (
            "speed=2",
            (
                "there is no setting speed to change; available: checkpoint_every, clip_norm,"
                " clip_value, compile, cuda_graphs, deterministic"
            ),
        ),
        ("steps=0", "--set steps=0: Input should be greater than or equal to 1"),
    ],
)
def test_a_setting_that_cannot_be_changed_says_why(
    begun: Path, given: str, line: str, capsys: Capture
) -> None:
    assert cli.run(["resume", str(begun), "--backend", "local", "--set", given]) == 2
    assert line in capsys.readouterr().err
