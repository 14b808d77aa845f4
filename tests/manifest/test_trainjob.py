"""Manifests for Kubeflow Trainer, and the command that their pods run, under torchrun itself."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.forked import done
from tests.manifest.nodes import variables
from tests.manifest.validity import check_valid
from tests.ports import free_port
from tests.waiting import wait_until

from trainload.cli import main as cli
from trainload.cli.commands.runs import launch
from trainload.launching.run.journal import read_events
from trainload.launching.run.run_state import read_state
from trainload.packaging.package import Package

Capture = pytest.CaptureFixture[str]
LEAST = ("--image", "registry.example/trainload:1", "--claim", "shared", "--memory", "16Gi")
JOB = ("gpt.tl", "--data", "train.parquet", *LEAST)
SPREAD = (*JOB, "--workers", "8/cuda", "--nodes", "4")


def written(capsys: Capture, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the runtime and the job."""
    assert cli.run(["manifest", "trainjob", *arguments]) == 0
    runtime, job = yaml.safe_load_all(capsys.readouterr().out)
    return runtime, job


def container_of(runtime: dict[str, Any]) -> dict[str, Any]:
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize(
    "options",
    [JOB, (*SPREAD, "--queue", "research:high", "--secret", "s3", "--", "--plan", "plan.json")],
    ids=["least", "most"],
)
def test_both_manifests_are_valid(options: tuple[str, ...], capsys: Capture) -> None:
    for manifest in written(capsys, *options):
        check_valid(manifest)


def test_the_job_uses_its_own_runtime(capsys: Capture) -> None:
    runtime, job = written(capsys, *JOB)
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }


def test_the_pods_run_a_launch_that_launch_itself_understands(capsys: Capture) -> None:
    runtime, job = written(capsys, *SPREAD, "--", "--plan", "plan.json", "--steps", "100")
    command = container_of(runtime)["command"]
    found = launch.make_context("launch", command[command.index("launch") + 1 :]).params
    assert (found["backend"], found["steps"]) == ("torchrun", 100)
    assert found["plan_file"] == Path("/trainload/plan.json")
    assert found["run_dir"] == Path("/trainload/runs/gpt")
    assert job["spec"]["trainer"] == {"numNodes": 4, "numProcPerNode": 8}
    assert container_of(runtime)["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_a_queue_is_for_the_job_alone(capsys: Capture) -> None:
    runtime, job = written(capsys, *JOB, "--queue", "research")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/queue-name" not in runtime["metadata"]["labels"]


def test_a_patch_selects_one_of_the_manifests_by_its_kind(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "patch.yaml").write_text(
        "kind: TrainingRuntime\n"
        "spec: {template: {spec: {replicatedJobs: [{name: node, template: {spec: {template:"
        " {spec: {nodeSelector: {pool: h200}}}}}}]}}}\n"
    )
    plain = written(capsys, *JOB)
    runtime, job = written(capsys, *JOB, "--patch", str(tmp_path / "patch.yaml"))
    assert job == plain[1]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "h200"}
    assert container_of(runtime) == container_of(plain[0])


def test_as_json_both_manifests_are_one_list(capsys: Capture) -> None:
    both = written(capsys, *JOB)
    assert cli.run(["manifest", "trainjob", *JOB, "--json"]) == 0
    listed = yaml.safe_load(capsys.readouterr().out)
    assert (listed["kind"], tuple(listed["items"])) == ("List", both)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*JOB, "--nodes", "2"), "several nodes need a plan"),
        ((*JOB, "--nodes", "1:2", "--", "--plan", "p"), "--nodes: a TrainJob has a fixed number"),
        ((*JOB, "--env", "PET_NNODES=2"), "--env: Kubeflow Trainer sets this variable"),
        ((*JOB, "--name", "a" * 51), "--name: this is not a valid Kubernetes name"),
        ((*JOB, "--store", "s3://bucket"), "Pass either --claim or --store"),
        ((*JOB, "--", "--backend", "ray"), "--backend cannot be used in a cluster's job"),
    ],
)
def test_what_cannot_run_is_rejected(
    arguments: tuple[str, ...], message: str, capsys: Capture
) -> None:
    assert cli.run(["manifest", "trainjob", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


STEPS = 10**6
"""More steps than the run makes before it is stopped."""


@contextmanager
def pod(command: Sequence[str], folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a pod's command with the variables that Kubeflow Trainer sets for two ranks."""
    own = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, env=variables(folder, **own), stdout=file, stderr=file
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def step_of(run_dir: Path) -> int:
    state = read_state(run_dir)
    return 0 if state is None else state.summary.step


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_pods_resume_after_a_termination_and_end_when_the_run_is_stopped(
    tiny: Package, tiny_data: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(tiny.path, tmp_path / "tiny.tl")
    shutil.copy(tiny_data, tmp_path / "train.npz")
    least = ("--image", "none", "--memory", "1Gi", "--claim", f"shared:{tmp_path}")
    rest = ("--workers", "2", "--", "--no-compile", "--steps", str(STEPS))
    runtime, _ = written(capsys, "tiny.tl", "--data", "train.npz", *least, *rest)
    command, run_dir = container_of(runtime)["command"], tmp_path / "runs" / "tiny"

    def is_at(step: int, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        return step_of(run_dir) >= step

    with pod(command, tmp_path, tmp_path / "log") as process:
        wait_until(lambda: is_at(5, process))
        process.send_signal(signal.SIGTERM)
        terminated = process.wait(120)
    assert terminated == 1, (tmp_path / "log").read_text()
    for _ in range(2):  # a run that was stopped is resumed too, by the same job
        before = step_of(run_dir)
        with pod(command, tmp_path, tmp_path / "log") as process:
            wait_until(lambda: is_at(before + 5, process))  # noqa: B023  # called at once
            assert done("stop", run_dir, cwd=tmp_path)[0] == 0
            stopped = process.wait(120)
        assert stopped == 0, (tmp_path / "log").read_text()
    events = read_events(run_dir)
    starts = [event.data["step"] for event in events if event.kind == "start"]
    assert starts == sorted(set(starts))
    assert len(starts) == 3
    done_steps = [event.data["step"] for event in events if event.kind == "step"]
    assert done_steps == list(range(len(done_steps))), "no step was done twice"
