"""Two kills of `benchmarks/kills.py`, uncompiled: while a checkpoint is written or published."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from benchmarks.killer import Kill, Killer
from tests.launch.undisturbed import CHECKPOINT_EVERY, STEPS

import trainload
from trainload.launching.checkpoints.index import CHECKPOINTS, published
from trainload.launching.run.journal import read_events
from trainload.launching.run.result import RunResult
from trainload.packaging.package import Package

pytestmark = pytest.mark.slow

MOMENTS = ("write", "publish")


def shards(result: RunResult) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(result.checkpoint).rglob("*.safetensors"))]


def done_steps(run_dir: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of all executed steps, including repeated ones."""
    events = (event.data for event in read_events(run_dir) if event.kind == "step")
    return [(data["step"], data["loss"], data["gradient_norm"]) for data in events]


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_run_killed_while_it_saves_has_the_losses_of_one_that_was_left_alone(
    gpt: Package, gpt_data: Path, undisturbed: RunResult, cache_dir: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(gpt, trainload.Cluster(devices_per_node=2), "zero3")
    seed = time.time_ns() % 10**6
    print(f"seeds {seed} and following")
    run_dir = tmp_path / "killed"
    killer = Killer(
        [Kill(number, moment, seed + number) for number, moment in enumerate(MOMENTS)],
        run_dir,
        cache_dir,
    )
    killer.start()
    try:
        result = trainload.launch(
            gpt,
            plan,
            gpt_data,
            run_dir=run_dir,
            steps=STEPS,
            checkpoint_every=CHECKPOINT_EVERY,
            compile=False,
        )
    finally:
        killer.stop()
    assert killer.error is None
    assert tuple(killed.hit for killed in killer.killed) == MOMENTS
    assert result.restarts == len(MOMENTS)
    assert set(done_steps(run_dir)) == set(done_steps(Path(undisturbed.run_dir)))
    assert shards(result) == shards(undisturbed)
    assert sorted(path.name for path in (run_dir / CHECKPOINTS).iterdir()) == [
        path.name for path in published(run_dir).values()
    ]
