"""What several tests of runs compare theirs with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launch.undisturbed import CHECKPOINT_EVERY, STEPS

import trainload
from trainload.launch.result import RunResult
from trainload.packaging.read import Package


@pytest.fixture(scope="session")
def undisturbed(ray_cluster: None, gpt: Package, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The GPT's run on two Ray workers under ZeRO-3, uncompiled, that nobody interrupts or kills."""
    plan = trainload.plan(gpt, trainload.Cluster(devices_per_node=2), "zero3")
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return trainload.launch(gpt, plan, gpt_data, run_dir=folder, steps=STEPS, checkpoint_every=CHECKPOINT_EVERY, compile=False)
