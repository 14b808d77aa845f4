"""A trial step runs on a run's first rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import trainload
from trainload.core.errors import PlanError
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.worker.trial import try_out
from trainload.packaging.package import Package


def spec(
    package: Package, data: Path, folder: Path, devices: int, strategy: Any, **options: Any
) -> RunSpec:
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=devices), strategy, **options)
    return RunSpec(
        package=str(package.path),
        plan=plan,
        data=str(data),
        run_dir=str(folder / "run"),
        steps=9,
        compile=False,
    )


@pytest.mark.matrix("1-single-*", "4-hybrid-*", "4-zero3-*")
@pytest.mark.parametrize(
    ("devices", "strategy", "options"),
    [
        (1, "single", {}),
        (4, "zero0", {"accumulate": 2}),
        (8, "zero3", {}),
        (4, "hybrid", {"shard_ranks": 2}),
        (4, "zero3", {"tensor_ranks": 2}),
    ],
)
def test_a_rank_is_tried_out_without_the_others(
    tiny: Package,
    tiny_data: Path,
    tmp_path: Path,
    devices: int,
    strategy: Any,
    options: dict[str, Any],
) -> None:
    trial = try_out(spec(tiny, tiny_data, tmp_path, devices, strategy, **options), devices)
    assert (
        min(trial.step, trial.first_step, trial.weights, trial.compile, trial.data, trial.package)
        > 0
    )
    assert not trial.compiled
    assert not dist.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_a_pipeline_is_not_tried_out(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="a single rank of a pipeline cannot run a trial step"):
        try_out(spec(tiny, tiny_data, tmp_path, 2, None, pipeline_ranks=2), 2)


def test_a_dry_run_says_how_long_each_part_takes(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    report = trainload.dry_run(
        tiny, plan, tiny_data, run_dir=tmp_path / "run", steps=11, compile=False, backend="local"
    )
    assert list(report.seconds) == [
        "checks",
        "simulate",
        "package",
        "data",
        "compile",
        "weights",
        "first_step",
        "step",
        "compare",
    ]
    assert report.run_seconds == pytest.approx(
        report.seconds["first_step"] + 10 * report.seconds["step"], abs=0.02
    )
    assert list(tmp_path.iterdir()) == []
