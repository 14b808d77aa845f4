"""Every row is trained on once per epoch, with any number of ranks.

This holds even if the run stops in the middle of epochs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.launch.counted import counts, demand_exact, freeze_counts

import trainload
from trainload.core.errors import DataError
from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package

pytestmark = pytest.mark.slow

ROWS = 101
"""Number of rows, a multiple neither of the global batch nor of any number of ranks."""
STOPS = (3, 7, 12, 17)
"""Steps at which the run stops, each in the middle of an epoch. The last one is its end."""
WORLDS = (2, 1, 2, 1)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Path]:
    return freeze_counts(ROWS, STOPS[-1], tmp_path_factory.mktemp("counts"))


@pytest.mark.timeout(300)
def test_a_run_that_stops_in_the_middle_of_epochs_and_changes_its_size_has_each_row_once_in_each(
    ray_cluster: None, frozen: tuple[Package, Path], tmp_path: Path
) -> None:
    package, data = frozen
    run_dir = tmp_path / "run"
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=WORLDS[0]), "zero2")
    trainload.launch(
        package,
        plan,
        data,
        run_dir=run_dir,
        steps=STOPS[0],
        compile=False,
        output=tmp_path / "0.tl",
    )
    for number, (steps, world) in enumerate(zip(STOPS[1:], WORLDS[1:], strict=True), 1):
        (tmp_path / "0.tl").rename(tmp_path / f"before-{number}.tl")
        trainload.resume(run_dir, workers=world, steps=steps)
    starts = [
        (event.data["step"], event.data["world"])
        for event in read_events(run_dir)
        if event.kind == "start"
    ]
    assert starts == list(zip((0, *STOPS), WORLDS, strict=False))
    demand_exact(counts(tmp_path / "0.tl"), STOPS[-1])


def test_a_ray_data_set_gives_each_row_once_in_each_epoch(
    ray_cluster: None, frozen: tuple[Package, Path], tmp_path: Path
) -> None:
    import ray.data

    package, _ = frozen
    data = ray.data.range(ROWS, override_num_blocks=5).rename_columns({"id": "row"})
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero2")
    trainload.launch(
        package, plan, data, run_dir=tmp_path / "run", compile=False, output=tmp_path / "trained.tl"
    )
    demand_exact(counts(tmp_path / "trained.tl"), STOPS[-1])


def test_a_ray_data_set_that_fails_is_said_at_once(
    ray_cluster: None, frozen: tuple[Package, Path], tmp_path: Path
) -> None:
    import ray.data

    def fail(batch: Any) -> Any:
        raise ValueError(f"no rows in process {os.getpid()}")

    package, _ = frozen
    data = ray.data.range(ROWS).map_batches(fail)
    plan = trainload.plan(package, trainload.Cluster(), "single")
    with pytest.raises(DataError, match=r"the data source failed: .*"):
        trainload.launch(package, plan, data, run_dir=tmp_path / "run", compile=False)
    assert not (tmp_path / "run").exists()
