"""The example of Kubernetes, on Ray and S3 of this machine: its scripts, and what its pods run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
import yaml
from tests.house.source import ROOT
from tests.launch.commands import TRAINLOAD, kill_all
from tests.launch.tiny import token_rows
from tests.manifest.nodes import Cluster, variables
from tests.manifest.validity import check_valid
from tests.packaging.places import BUCKET, KEYS, s3_server

import trainload
from trainload.launching.run.journal import read_events
from trainload.launching.run.working_copy import state_at, viewed
from trainload.packaging.package import Package

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "examples" / "kubernetes"
PLACE = f"s3://{BUCKET}/jobs"
RUN = f"{PLACE}/runs/gpt"
STEPS = 400


@dataclass(frozen=True)
class Story:
    """The outcome of the example.

    The driver of the first job is killed; the second job is the same one again.
    """

    manifest: dict[str, Any]
    first: str
    shown: str
    second: tuple[str, str]
    releases: list[str]


def script(name: str, *arguments: str | Path) -> str:
    """Run a script of the example. Returns its output."""
    interpreter = [sys.executable] if name.endswith(".py") else []
    command = [*interpreter, EXAMPLE / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def upload_rows(server: str) -> None:
    rows = token_rows(91)
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    files = s3fs.S3FileSystem(
        key=KEYS["AWS_ACCESS_KEY_ID"],
        secret=KEYS["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=server,
        skip_instance_cache=True,
    )
    with files.open(f"{PLACE}/rows/0.parquet", "wb") as file:
        pq.write_table(pa.table({"tokens": column}), file)


def environment_of(manifest: dict[str, Any], group: str) -> dict[str, str]:
    """Return the variables of a group's container: its own, and the entries of its Secret."""
    spec = manifest["spec"]["rayClusterSpec"]
    groups = {"ray-head": spec["headGroupSpec"], "ray-worker": spec["workerGroupSpecs"][0]}
    (container,) = groups[group]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    return {each["name"]: each["value"] for each in container["env"]} | KEYS


def is_at(step: int) -> bool:
    state = state_at(RUN)
    return state is not None and state.summary.step > step


@pytest.fixture(scope="module")
def story(tiny: Package, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("example")
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        there = {**KEYS, "AWS_ENDPOINT_URL": server, "TRAINLOAD_CACHE_DIR": str(folder / "cache")}
        binaries = f"{Path(TRAINLOAD[0]).parent}{os.pathsep}{os.environ['PATH']}"
        for name, value in (there | {"PATH": binaries, "PLACE": PLACE, "IMAGE": "none"}).items():
            patch.setenv(name, value)
        upload_rows(server)
        options = ("--steps", str(STEPS), "--checkpoint-every", "100", "--no-compile")
        manifest = yaml.safe_load(script("submit.sh", tiny.path, *options))
        cluster = Cluster(folder, variables(folder) | environment_of(manifest, "ray-head") | there)
        try:
            cluster.start_head()
            cluster.variables |= environment_of(manifest, "ray-worker") | there
            cluster.start_worker()
            entrypoint = manifest["spec"]["entrypoint"]
            cluster.submit(f"MARK={folder} {entrypoint}", "first")
            cluster.until(lambda: is_at(110), 200)
            kill_all(f"MARK={folder}")  # the driver, and the process that would replace it
            first, _ = cluster.ended("first", 120)
            shown = subprocess.run(
                [*TRAINLOAD, "status", RUN], capture_output=True, text=True, timeout=60, check=True
            )
            cluster.submit(entrypoint, "second")
            second = cluster.ended("second", 300)
            script("publish.py", PLACE)
            states = trainload.releases(f"{PLACE}/store")["gpt"]
            releases = [each.release.id for each in states]
            yield Story(manifest, first, shown.stdout, second, releases)
        finally:
            cluster.close()


def test_its_manifest_is_valid_and_patched(story: Story) -> None:
    check_valid(story.manifest)
    (workers,) = story.manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["template"]["spec"]["nodeSelector"] == {"pool": "training"}


def test_a_killed_driver_fails_its_job_and_the_next_one_resumes_the_run(story: Story) -> None:
    assert story.first == "FAILED"
    assert story.second[0] == "SUCCEEDED", story.second[1]
    with viewed(RUN) as run:
        events = read_events(run.folder)
    starts = [event.data["step"] for event in events if event.kind == "start"]
    assert starts[0] == 0
    assert 100 <= starts[-1] < STEPS
    last = max(event.data["step"] for event in events if event.kind == "step")
    assert last == STEPS - 1


def test_the_status_is_read_from_the_object_store(story: Story) -> None:
    assert RUN in story.shown.replace("\n", "")
    assert f"of {STEPS}" in story.shown


def test_the_result_is_the_next_release(story: Story) -> None:
    assert len(story.releases) == 2
