"""Workers on a cluster rendezvous through checkpoints in S3 alone, and resume from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.checkpoint_places import Kept
from tests.launch.checkpoints.test_checkpoint_writing import environment

import trainload
from trainload.launching.run.journal import losses, read_events
from trainload.packaging.package import Package

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 40


@pytest.mark.timeout(400)
def test_workers_of_which_one_is_killed_go_on_from_s3_and_so_does_another_number_of_them(
    gpt: Package, gpt_data: Path, bucket: Kept, tmp_path: Path
) -> None:
    script = str(Path(__file__).parents[1] / "url_run.py")
    command = [
        sys.executable,
        "-W",
        "ignore",
        script,
        str(tmp_path / "run"),
        str(gpt.path),
        str(gpt_data),
        bucket.url,
        str(STEPS),
    ]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    two, one = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    assert two["restarts"] == 1
    assert two["starts"][0] == 0
    assert 2 <= two["starts"][1] < STEPS
    assert one["starts"][2:] == [STEPS]
    assert one["checkpoint"] == f"{bucket.url}/step-{STEPS + 2:08}"
    plan = trainload.plan(gpt, trainload.Cluster(), "single")
    alone = trainload.launch(
        gpt,
        plan,
        gpt_data,
        run_dir=tmp_path / "alone",
        steps=STEPS + 2,
        compile=False,
        backend="local",
    )
    assert one["losses"] == pytest.approx(losses(read_events(Path(alone.run_dir))), abs=1e-5)
    assert not (tmp_path / "run" / "checkpoints").exists()
