"""A schedule that would still rise when the run ends is rejected before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch.commands import refused

import trainload
from trainload.core.errors import JobError
from trainload.packaging.package import Package

STEPS = 10
Capture = pytest.CaptureFixture[str]


def rates(package: Package, schedule: str, steps: int | None) -> list[float]:
    recipe = trainload.Overrides(lr=0.5, schedule=schedule).apply(package, steps).recipe
    return [recipe.rates(step)[0] for step in range(steps or recipe.steps)]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_schedule_may_rise_until_the_last_step(tiny: Package, shape: str) -> None:
    assert max(rates(tiny, f"{shape}:{STEPS - 1}", STEPS)) == pytest.approx(0.5)


@pytest.mark.parametrize("warmup", [STEPS, 100 * STEPS])
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_schedule_that_rises_throughout_the_run_is_refused(
    tiny: Package, shape: str, warmup: int
) -> None:
    expected = f"expected {shape}:N with N less than the run's {STEPS} steps, got {shape}:{warmup}"
    with pytest.raises(
        JobError, match=f"^schedule: the warm-up does not end within the run.*{expected}"
    ):
        rates(tiny, f"{shape}:{warmup}", STEPS)


def test_a_plan_is_made_where_the_runs_steps_are_not_known_yet(tiny: Package) -> None:
    assert len(rates(tiny, f"cosine:{10 * tiny.recipe.steps}", None)) == tiny.recipe.steps


def test_a_launch_says_which_setting_it_refuses(
    tiny: Package, tiny_data: Path, tmp_path: Path, capsys: Capture
) -> None:
    options = [
        "--run-dir",
        str(tmp_path / "run"),
        "--steps",
        str(STEPS),
        "--backend",
        "local",
        "--set",
        "schedule=cosine:1000",
    ]
    line = refused(["launch", str(tiny.path), "--data", str(tiny_data), *options], tmp_path, capsys)
    assert "schedule: the warm-up does not end within the run" in line
    assert "got cosine:1000" in line


def test_a_launch_of_the_jobs_own_steps_is_refused_too(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    overrides = trainload.Overrides(schedule=f"linear:{tiny.recipe.steps}")
    with pytest.raises(JobError, match=f"less than the run's {tiny.recipe.steps} steps"):
        trainload.launch(
            tiny, plan, tiny_data, run_dir=tmp_path / "run", backend="local", overrides=overrides
        )
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_shortened_into_its_rise(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    overrides = trainload.Overrides(schedule="linear:3")
    trainload.launch(
        tiny,
        plan,
        tiny_data,
        run_dir=tmp_path / "run",
        steps=4,
        backend="local",
        compile=False,
        overrides=overrides,
    )
    with pytest.raises(JobError, match="got linear:6"):
        trainload.resume(
            tmp_path / "run",
            backend="local",
            steps=5,
            overrides=trainload.Overrides(schedule="linear:6"),
        )
