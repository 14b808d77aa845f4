"""Manifests for Kubeflow Trainer: a TrainJob that runs torchrun, with its own TrainingRuntime.

They are written for Kubeflow Trainer 2 (trainer.kubeflow.org/v1alpha1).

- Trainer creates one pod for each node and sets torchrun's PET_* variables in the container "node".
- A Job does not replace a single pod, since torchrun's other pods would wait for it: the JobSet
  starts all pods again, up to its number of retries, and the run resumes.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainload.core.errors import RequestError
from trainload.deploy.kuberay import (
    CPUS_PER_GPU,
    Json,
    Pods,
    check_label,
    container_of,
    device_limits,
    metadata_of,
    pod_of,
    suspended,
)

_GROUP = "trainer.kubeflow.org"
_VERSION = f"{_GROUP}/v1alpha1"
_NODE = "node"
"""Name of the replicated job and of its container, by which Trainer finds them."""
_RESERVED = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)
"""Variables of torchrun that Trainer sets, and rejects in a TrainJob."""
_MOST_NAME = 50
"""Maximum length of a name, to which JobSet appends indices and a random suffix."""


def torchrun_command(run_dir: str, options: Sequence[str], before: Sequence[str] = ()) -> list[str]:
    """Return the command of each pod: it launches a run under torchrun, or resumes it.

    Args:
        run_dir: the run's folder, as a path in the pods, or its URL.
        options: arguments of `trainload launch`, except --run-dir and --backend.
        before: options of `trainload` itself.
    """
    launch = [*before, "launch", *options, "--run-dir", run_dir, "--backend", "torchrun"]
    return ["python", "-m", "trainload", "manifest", "drive", "--torchrun", run_dir, "--", *launch]


def train_job(pods: Pods, command: Sequence[str], retries: int) -> list[Json]:
    """Return a TrainingRuntime, and a TrainJob that uses it.

    Args:
        pods: its pods, one for each node.
        command: command of the pods (`torchrun_command`).
        retries: number of times that all pods are started again after a failure.

    Raises:
        RequestError: the name is invalid, the number of nodes is a range, or a variable is one that
            Trainer sets.
    """
    check_label(pods.name, "--name", most=_MOST_NAME, letter=True)
    if pods.elastic:
        raise RequestError(
            "a TrainJob has a fixed number of nodes",
            where="--nodes",
            expected="one number",
            got=f"{pods.nodes[0]}:{pods.nodes[1]}",
            hint="Elastic runs need Ray: trainload manifest kuberay.",
        )
    for name in pods.env:
        if name in _RESERVED:
            raise RequestError(
                "Kubeflow Trainer sets this variable",
                where="--env",
                expected=f"none of {', '.join(_RESERVED)}",
                got=name,
            )
    cpus = pods.devices * CPUS_PER_GPU if pods.gpu else pods.devices
    container = container_of(pods, _NODE, cpus, device_limits(pods))
    container["command"] = list(command)
    pod = {"restartPolicy": "Never", **pod_of(pods, container, ranks=pods.devices, token=False)}
    job = {
        "name": _NODE,
        "template": {
            "metadata": {"labels": {f"{_GROUP}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    }
    metadata = metadata_of(pods)
    own_labels = {"app.kubernetes.io/managed-by": "trainload"}
    runtime = {
        "apiVersion": _VERSION,
        "kind": "TrainingRuntime",
        # a queue is for the job alone
        "metadata": {**metadata, "labels": {**own_labels, f"{_GROUP}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": pods.nodes[0], "torch": {}},
            "template": {
                "spec": {"failurePolicy": {"maxRestarts": retries}, "replicatedJobs": [job]}
            },
        },
    }
    train = {
        "apiVersion": _VERSION,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": _GROUP, "kind": "TrainingRuntime", "name": pods.name},
            **suspended(pods),
            "trainer": {"numNodes": pods.nodes[0], "numProcPerNode": pods.devices},
        },
    }
    return [runtime, train]
