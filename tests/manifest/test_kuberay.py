"""Output of `trainload manifest kuberay`; `make kuberay` validates it with KubeRay's schemas."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.manifest.variants import JOB, LEAST, VARIANTS

from trainload.cli import main as cli
from trainload.cli.commands.runs import launch
from trainload.deploy.kuberay import LONGEST_NAME

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *arguments: str) -> str:
    assert cli.run(["manifest", "kuberay", *arguments]) == 0
    return capsys.readouterr().out


def written(capsys: Capture, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(said(capsys, *arguments))
    return found


def refused(capsys: Capture, *arguments: str) -> str:
    """Run a command that is rejected, and return its error message."""
    assert cli.run(["manifest", "kuberay", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return " ".join(printed.err.split())


def cluster(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (
        manifest["spec"]["rayClusterSpec"] if manifest["kind"] == "RayJob" else manifest["spec"]
    )
    return found


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster(manifest)["headGroupSpec"], *cluster(manifest)["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def launched(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the launch in a job's entrypoint, parsed by the launch command."""
    words = shlex.split(manifest["spec"]["entrypoint"])
    return launch.make_context("launch", words[words.index("launch") + 1 :]).params


@pytest.mark.parametrize("name", VARIANTS)
def test_yaml_and_json_say_the_same(name: str, capsys: Capture) -> None:
    arguments = VARIANTS[name]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    assert written(capsys, *arguments) == json.loads(
        said(capsys, *arguments[:at], "--json", *arguments[at:])
    )


def test_a_job_runs_a_launch_that_launch_itself_understands(capsys: Capture) -> None:
    found = launched(written(capsys, *VARIANTS["a job of everything"]))
    assert found["package"] == "/trainload/gpt.tl"
    assert found["data"] == "/trainload/train.parquet"
    assert found["run_dir"] == Path("/trainload/runs/a b")
    assert (found["address"], found["steps"], found["assignments"]) == ("auto", 100, ("lr=3e-4",))
    assert found["eval_data"] == "s3://bucket/held-out.parquet"


def test_an_elastic_job_has_the_range_of_its_nodes_in_both_places(capsys: Capture) -> None:
    found = written(capsys, *VARIANTS["an elastic job"])
    (workers,) = cluster(found)["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == launched(found)["nodes"] == (2, 8)
    assert cluster(found)["enableInTreeAutoscaling"] is True


def test_devices_are_what_the_ranks_need(capsys: Capture) -> None:
    found = written(capsys, *VARIANTS["a job on GPUs"])
    _, worker = containers(found)
    assert worker["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": 8}
    assert launched(found)["workers"] == (8, "cuda")


def test_the_head_has_no_rank(capsys: Capture) -> None:
    assert cluster(written(capsys, *JOB))["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_a_job_drives_a_run_that_may_be_there_already(capsys: Capture) -> None:
    entrypoint = written(capsys, *JOB)["spec"]["entrypoint"]
    assert entrypoint.startswith(
        "exec python -m trainload manifest drive /trainload/runs/gpt -- launch /trainload/gpt.tl"
        " --data "
    )
    assert entrypoint.endswith(" --run-dir /trainload/runs/gpt --address auto")


def test_libraries_are_those_of_the_launch(capsys: Capture) -> None:
    assert cli.run(["--library", "mine=my_operators", "manifest", "kuberay", *JOB]) == 0
    entrypoint = yaml.safe_load(capsys.readouterr().out)["spec"]["entrypoint"]
    assert " -- --library mine=my_operators launch /trainload/gpt.tl " in entrypoint


def test_the_heads_end_stops_the_run_as_one_that_goes_on(capsys: Capture) -> None:
    head, worker = containers(written(capsys, *JOB))
    command = head["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python", "-m", "trainload", "manifest", "evict", "/trainload/runs/gpt"]
    assert "lifecycle" not in worker


def test_secrets_are_named_and_not_written(capsys: Capture) -> None:
    found = written(capsys, *VARIANTS["a job of everything"])
    assert all(
        each["envFrom"] == [{"secretRef": {"name": "s3-keys"}}, {"secretRef": {"name": "tracking"}}]
        for each in containers(found)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_pods_have_no_privileges(name: str, capsys: Capture) -> None:
    for container in containers(written(capsys, *VARIANTS[name])):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_without_a_claim_all_places_are_urls(capsys: Capture) -> None:
    job = written(capsys, *VARIANTS["a job without a volume"])
    words = shlex.split(job["spec"]["entrypoint"])
    place = "s3://bucket/jobs"
    run = f"{place}/runs/gpt"
    assert words[words.index("drive") + 1] == words[words.index("--run-dir") + 1] == run
    assert words[words.index("launch") + 1] == f"{place}/gpt.tl"
    assert words[words.index("--data") + 1] == f"{place}/rows/*.parquet"
    assert words[words.index("--output") + 1] == f"{place}/trained.tl"
    for container in containers(job):
        assert [each["name"] for each in container["volumeMounts"]] == ["shared-memory", "cache"]


def test_a_cluster_asks_for_a_token(capsys: Capture) -> None:
    assert cluster(written(capsys, *JOB))["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*JOB, "--name", "My_Run"), "--name: this is not a valid Kubernetes name"),
        ((*JOB, "--name", "a" * (LONGEST_NAME["RayJob"] + 1)), "at most 47 of a-z, 0-9 and -"),
        ((*JOB, "--name", "7b"), "which begin with a letter"),
        ((*JOB, "--namespace", "a.b"), "--namespace: this is not a valid Kubernetes name"),
        ((*JOB, "--memory", "lots"), "--memory: this is not a quantity of memory"),
        ((*JOB, "--claim", "shared:relative"), "--claim: nothing can be mounted there"),
        ((*JOB, "--claim", "shared:/dev/shm"), "--claim: nothing can be mounted there"),
        ((*JOB, "--env", "1X=2"), "--env: this is not the name of an environment variable"),
        ((*JOB, "--kind", "RayCluster"), "--kind RayCluster does not start a run"),
        ((*JOB, "--store", "s3://bucket/jobs"), "Pass either --claim or --store"),
        (LEAST, "--kind RayJob needs a package and --data"),
        ((*JOB, "--", "--nodes", "2"), "--nodes is an option of this command"),
        ((*JOB, "--", "--detach"), "--detach cannot be used in a cluster's job"),
        ((*JOB, "--", "--set", "speed=2"), "--set speed=2: there is no setting speed"),
        (
            (*JOB, "--data", "s3://key:hunter2000@bucket/x.parquet"),
            "the URL contains credentials, which would be written to files",
        ),
    ],
)
def test_what_cannot_be_says_so(arguments: tuple[str, ...], message: str, capsys: Capture) -> None:
    assert message in refused(capsys, *arguments)


def test_a_variable_that_looks_like_a_secret_is_refused_without_its_value(capsys: Capture) -> None:
    text = refused(capsys, *JOB, "--env", "API_TOKEN=hunter2000")
    assert "API_TOKEN looks like a secret" in text
    assert "hunter2000" not in text


def test_a_file_is_written_where_it_is_asked_for(tmp_path: Path, capsys: Capture) -> None:
    assert said(capsys, *JOB, "--output", str(tmp_path / "job.yaml")) == ""
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["kind"] == "RayJob"
