"""A manifest's job on Ray itself, with nodes and submission the way KubeRay does it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError

import pytest
from tests.launch.commands import TRAINLOAD
from tests.manifest.nodes import Cluster, variables
from tests.manifest.variants import made

from trainload.launching.run.journal import Event, losses, read_events
from trainload.launching.run.run_state import read_state
from trainload.packaging.package import Package

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 2500
"""Number of steps, five times as many as are done before the run is stopped."""
DRAIN_SECONDS = 60.0
SECRET = "hunter2000"


@dataclass(frozen=True)
class Story:
    """The outcome of a job's run on a cluster."""

    run_dir: Path
    folder: Path
    warned: Event
    left: Event
    seconds_to_warn: float
    ray_ended: float
    first: tuple[str, str]
    stranger: int
    cluster: Cluster
    entrypoint: str


def announced(run_dir: Path) -> list[Event]:
    """Return the preemption events of a run."""
    return [event for event in read_events(run_dir) if event.kind == "preemption"]


@pytest.fixture(scope="module")
def story(
    gpt: Package, gpt_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    """The outcome of a job whose node gets SIGTERM.

    The job continues on a node that is started later, and is stopped. The cluster is still running.
    """
    folder, volume = tmp_path_factory.mktemp("ray"), tmp_path_factory.mktemp("volume")
    shutil.copytree(gpt.path, volume / "gpt.tl")
    (volume / SECRET).mkdir()
    shutil.copy(gpt_data, volume / SECRET / "train.npz")
    manifest = made(
        "manifest",
        "kuberay",
        *(
            "gpt.tl",
            "--data",
            "${env:DATA}/train.npz",
            "--image",
            "none",
            "--claim",
            f"shared:{volume}",
            "--memory",
            "1Gi",
        ),
        *("--", "--steps", str(STEPS), "--no-compile"),
    )
    entrypoint = manifest["spec"]["entrypoint"]
    (container,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"][
        "containers"
    ]
    assert (
        float(
            {each["name"]: each["value"] for each in container["env"]}[
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
            ]
        )
        > DRAIN_SECONDS
    )
    settings = {
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS),
        "DATA": str(volume / SECRET),
    }
    cluster = Cluster(folder, variables(folder, **settings))
    run_dir = volume / "runs" / "gpt"
    try:
        cluster.start_head()
        worker = cluster.start_worker()
        try:
            cluster.asked("/api/jobs/", {"entrypoint": "true"}, token=False)
            stranger = 200
        except HTTPError as error:
            stranger = error.code
        cluster.submit(entrypoint, "first")
        cluster.until(lambda: (state := read_state(run_dir)) and state.summary.step > 5, 300)
        asked = time.time()
        worker.send_signal(signal.SIGTERM)
        (warned,) = cluster.until(lambda: announced(run_dir), 30)
        cluster.start_worker()
        left = cluster.until(lambda: announced(run_dir)[1:], 60)[0]
        cluster.until(lambda: [each.kind for each in read_events(run_dir)].count("start") == 2, 60)
        worker.wait(DRAIN_SECONDS)
        ray_ended = time.time() - asked
        before_end = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"][
            "containers"
        ][0]["lifecycle"]["preStop"]
        subprocess.run(
            [*TRAINLOAD, *before_end["exec"]["command"][3:]],
            env=cluster.variables,
            check=True,
            capture_output=True,
            timeout=60,
        )
        first = cluster.ended("first", 60)
        yield Story(
            run_dir,
            volume,
            warned,
            left,
            warned.time - asked,
            ray_ended,
            first,
            stranger,
            cluster,
            entrypoint,
        )
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def second(story: Story) -> tuple[str, str]:
    """Status and output of the same job, submitted again."""
    story.cluster.submit(story.entrypoint, "second")
    return story.cluster.ended("second", 400)


@pytest.mark.timeout(900)
def test_a_node_that_gets_sigterm_is_saved_from_at_once(story: Story) -> None:
    assert story.warned.data["message"].endswith(
        ": a checkpoint is written; no other node is available yet"
    )
    assert story.seconds_to_warn < 15


def test_a_run_goes_to_a_node_that_comes_after_the_warning(story: Story) -> None:
    assert story.left.data["node"] == story.warned.data["node"]
    assert "the run moves to other nodes, with a checkpoint" in story.left.data["message"]


def test_ray_waits_for_the_run_to_leave_and_no_longer(story: Story) -> None:
    assert story.ray_ended < DRAIN_SECONDS


def test_what_runs_before_the_head_ends_stops_the_run_with_a_checkpoint(story: Story) -> None:
    assert story.first[0] == "FAILED"
    kinds = [each.kind for each in read_events(story.run_dir)]
    assert kinds.index("checkpoint") < kinds.index("stopped")


@pytest.mark.timeout(900)
def test_the_same_job_again_goes_on_where_the_first_was(
    story: Story, second: tuple[str, str]
) -> None:
    status, printed = second
    assert status == "SUCCEEDED", printed
    assert SECRET not in printed
    events = read_events(story.run_dir)
    starts = [each.data["step"] for each in events if each.kind == "start"]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert 5 < starts[1] < starts[2] < STEPS
    assert len(losses(events)) == STEPS
    done = [each.data["step"] for each in events if each.kind == "step"]
    assert done == list(range(STEPS)), "no step was done twice"


@pytest.mark.timeout(900)
def test_a_run_that_has_ended_is_no_failure_of_a_third_job(
    story: Story, second: tuple[str, str]
) -> None:
    assert second[0] == "SUCCEEDED"
    story.cluster.submit(story.entrypoint, "third")
    status, printed = story.cluster.ended("third", 120)
    assert status == "SUCCEEDED", printed


def test_who_has_no_token_submits_nothing(story: Story) -> None:
    assert story.stranger in (401, 403)


def test_neither_the_run_nor_the_jobs_output_has_the_secret(story: Story) -> None:
    files = [
        path for path in story.folder.rglob("*") if path.is_file() and path.parent.name != SECRET
    ]
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in story.first[1]
