"""CUDA graphs that are asked for where there can be none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainload
from trainload.core.errors import RequestError
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import DeviceKind


@pytest.mark.parametrize(
    ("device", "devices", "options", "said"),
    [
        ("cpu", 1, {}, "a cluster of CPUs"),
        ("cuda", 1, {"offload": 1.0}, "offload, which allocates memory of the host"),
        ("cuda", 2, {"pipeline_ranks": 2}, "a pipeline, whose stages keep"),
    ],
)
def test_they_are_refused_before_a_run_begins(
    package: Package,
    tmp_path: Path,
    device: DeviceKind,
    devices: int,
    options: dict[str, Any],
    said: str,
) -> None:
    cluster = trainload.Cluster(devices_per_node=devices, device=device)
    plan = trainload.plan(package, cluster, global_batch=8, **options)
    with pytest.raises(RequestError, match=f"cannot be recorded as CUDA graphs .*got {said}"):
        trainload.launch(
            package, plan, tmp_path / "none.npz", run_dir=tmp_path / "run", cuda_graphs=True
        )
    assert not (tmp_path / "run").exists()
