"""A tick as a Ray job that is killed during training, and the tick loop that completes it."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.manifest.nodes import Cluster, variables
from tests.manifest.variants import made
from tests.retraining.conftest import write_day

from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.run_state import read_state
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.retraining.ticks.lineage import LineStory, read_line

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 300


@dataclass(frozen=True)
class Story:
    """Status and output of the jobs, and the line after them."""

    jobs: tuple[tuple[str, str], ...]
    runs: tuple[Path, ...]
    reasons: tuple[str, ...]
    line: LineStory


@pytest.fixture(scope="module")
def story(small: Package, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A RayCronJob's job whose process is killed, followed by `retrain run` as a job."""
    folder, volume = tmp_path_factory.mktemp("ray"), tmp_path_factory.mktemp("volume")
    shutil.copytree(small.path, volume / "small.tl")
    write_day(volume / "data" / "0.arrow", rows=120)
    config = {
        "store": "store",
        "line": "small",
        "package": "small.tl",
        "data": {"files": "data/*.arrow"},
        "evaluation": {"hold_out": 0.25},
        "train": {"steps": STEPS, "checkpoint_every": 20},
        "cluster": {
            "address": "auto",
            "nodes": 2,
            "workers": 1,
            "strategy": "zero3",
            "compile": False,
        },
        "gate": {"require": "eval.loss < champion.eval.loss * 10"},
        "schedule": {"every": "7d"},
        "lease": {"seconds": "60s"},
    }
    file = volume / "retrain.yaml"
    file.write_text(yaml.safe_dump(config))
    manifest = made(
        "retrain",
        "manifest",
        "raycronjob",
        str(file),
        "--image",
        "none",
        "--claim",
        f"shared:{volume}",
    )
    entrypoint = manifest["spec"]["jobTemplate"]["entrypoint"]
    cluster = Cluster(folder, variables(folder))
    jobs = []
    try:
        cluster.start_head()
        for _ in range(2):
            cluster.start_worker()
        cluster.submit(entrypoint, "first")
        state = cluster.until(
            lambda: next(
                (
                    found
                    for found in map(read_state, runs(volume))
                    if found and found.summary.checkpoint
                ),
                None,
            ),
            120,
        )
        os.kill(state.pid, signal.SIGKILL)
        jobs.append(cluster.ended("first", 60))
        cluster.submit(f"python -m trainload retrain run {file} --ticks 1", "second")
        jobs.append(cluster.ended("second", 240))
    finally:
        cluster.close()
    store = Store(volume / "store")
    reasons = tuple(entry.reason for entry in store.history("small"))
    return Story(tuple(jobs), tuple(runs(volume)), reasons, read_line(store, "small"))


def runs(volume: Path) -> list[Path]:
    return sorted(volume.glob("retraining/small/*/run-[0-9]"))


@pytest.mark.timeout(600)
def test_a_job_whose_process_was_killed_has_failed(story: Story) -> None:
    assert story.jobs[0][0] == "FAILED"


def test_the_loop_as_a_job_ends_the_tick(story: Story) -> None:
    assert story.jobs[1][0] == "SUCCEEDED", story.jobs[1][1]
    (tick,) = story.line.ticks
    assert tick.ended is not None
    assert (tick.ended.outcome, tick.ended.release, tick.begun) == ("promoted", "00000002", 2)


def test_it_goes_on_with_the_run_that_was_lost(story: Story) -> None:
    (run,) = story.runs
    events = read_events(run)
    starts = [each.data["step"] for each in events if each.kind == "start"]
    assert (starts[0], len(starts), starts[1] >= 20) == (0, 2, True)
    assert len(losses(events)) == STEPS


def test_it_takes_the_place_of_the_lease_that_was_not_given_back(story: Story) -> None:
    assert [reason.startswith("lease 2 replaces lease 1") for reason in story.reasons].count(
        True
    ) == 1
