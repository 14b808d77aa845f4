"""A run whose checkpoints are gone does not start over by itself, on any backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.laws.runs import Run, ranks, train

import trainload
from trainload.core.errors import CheckpointError
from trainload.launching.api.launch import prepare
from trainload.launching.checkpoints.index import CHECKPOINTS
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package


def starts(run_dir: Path) -> int:
    return sum(event.kind == "start" for event in read_events(run_dir))


def test_it_is_refused_in_process(tiny: Package, tiny_data: Path, tmp_path: Path) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    trainload.launch(
        tiny, plan, tiny_data, run_dir=tmp_path / "run", steps=2, compile=False, backend="local"
    )
    shutil.rmtree(tmp_path / "run" / CHECKPOINTS)
    with pytest.raises(
        CheckpointError, match=r"none of the run's checkpoints can be used \(got no checkpoints\)"
    ):
        trainload.resume(tmp_path / "run", backend="local")
    assert starts(tmp_path / "run") == 1


def test_a_run_that_never_had_one_begins_again(
    tiny: Package, tiny_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    prepare(
        tiny, plan, tiny_data, run_dir=tmp_path / "run", steps=2, compile=False, backend="local"
    )
    assert trainload.resume(tmp_path / "run", backend="local").steps == 2


@pytest.mark.slow
def test_it_is_refused_under_torchrun(tiny: Package, tiny_data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(
        2,
        [
            Run(
                run_dir,
                tiny,
                trainload.plan(tiny, trainload.Cluster(devices_per_node=2)),
                tiny_data,
                {"steps": 2},
            )
        ],
        tmp_path,
    )
    shutil.rmtree(run_dir / CHECKPOINTS)
    with ranks(2, [Run(run_dir, resume={})], tmp_path) as resumed:
        for process in resumed:
            process.join(120)
        assert [process.exitcode for process in resumed] == [1, 1]
    assert "none of the run's checkpoints can be used" in (tmp_path / "rank-0.log").read_text()
    assert starts(run_dir) == 1
