"""Manifests for KubeRay: a Ray cluster, and a run on one, as data for `kubectl apply`.

They are written for KubeRay 1.6 and 1.7 and Ray 2.60; `make kuberay CRDS=FOLDER` validates them
against KubeRay's schemas.

- The job is submitted over HTTP, so that its entrypoint reaches Ray unchanged, and is submitted
  again if the head is replaced.
- A pod that is terminated receives SIGTERM. `ray start --block` then drains its node and waits,
  while the run writes a checkpoint or moves to other nodes.
- A job with a nonzero exit status has failed, and KubeRay creates another cluster for it, up to its
  number of retries.
- An elastic cluster has Ray's autoscaler, from which a run requests its maximum number of nodes.
  KubeRay starts a job only when all requested pods are running, so the manifest requests the
  minimum number.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import PurePosixPath
from typing import Any, Literal

from packaging.requirements import Requirement

from trainload.core.errors import RequestError
from trainload.core.redaction import HIDDEN, is_secret_name, redacted
from trainload.launching.doctor.machine_limits import SHARED_BYTES

Kind = Literal["RayJob", "RayCluster"]
Json = dict[str, Any]

LONGEST_NAME: Mapping[Kind, int] = {"RayJob": 47, "RayCluster": 53}
"""Maximum length of names in KubeRay, which appends to them."""
GRACE_SECONDS = 120
"""Time of a pod between SIGTERM and SIGKILL."""
DRAIN_SECONDS = GRACE_SECONDS - 10
"""Time for which Ray waits for tasks on a draining node."""
CPUS_PER_GPU = 4
NVIDIA = "nvidia.com/gpu"
HEAD_CPUS, HEAD_MEMORY = 2, "8Gi"
_KEPT_SECONDS = 600
_OBJECT_STORE_BYTES = 256 * 2**20
_SHARED_MEMORY_MIB = SHARED_BYTES // 2**20
_USER, _GROUP = 1000, 100
_CACHE = "/cache"
_OWN_PATHS = (_CACHE, "/dev", "/proc", "/sys", "/tmp/ray")

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Pods of a cluster: a head for the driver, and workers for the ranks.

    Attributes:
        name: name of the RayJob or RayCluster.
        image: container image with trainload and Ray.
        nodes: minimum and maximum number of workers.
        devices: number of CPUs or GPUs of each worker for ranks.
        gpu: True if the devices are GPUs.
        gpu_resource: name of a GPU as a resource of Kubernetes.
        memory: memory of each worker, a quantity such as 64Gi.
        claim: PersistentVolumeClaim that all pods mount; None if their places are URLs.
        mount: path of the mount.
        namespace: namespace; None for kubectl's.
        secrets: Secrets whose entries become environment variables.
        env: further environment variables, which must not be secrets.
        service_account: service account; None for the namespace's default.
        ray: version of Ray in the image.
        queue: LocalQueue of Kueue, which starts the cluster when there is room; None for none.
        priority: WorkloadPriorityClass of Kueue; None for none.

    Raises:
        RequestError: a name is invalid, a variable looks like a secret, or another value is
            invalid.
    """

    name: str
    image: str
    nodes: tuple[int, int]
    devices: int
    gpu: bool
    memory: str
    claim: str | None
    mount: str = "/trainload"
    namespace: str | None = None
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    ray: str = ""
    gpu_resource: str = NVIDIA
    queue: str | None = None
    priority: str | None = None

    def __post_init__(self) -> None:
        if self.claim is not None:
            check_label(self.claim, "--claim", dots=True)
        if self.namespace is not None:
            check_label(self.namespace, "--namespace")
        if self.service_account is not None:
            check_label(self.service_account, "--service-account", dots=True)
        for name in self.secrets:
            check_label(name, "--secret", dots=True)
        if not _RESOURCE.fullmatch(self.gpu_resource):
            raise RequestError(
                "this is not a resource of Kubernetes",
                where="--workers",
                expected="such as nvidia.com/gpu or amd.com/gpu",
                got=self.gpu_resource,
            )
        for label in (self.queue, self.priority):
            if label is not None:
                check_label(label, "--queue", dots=True)
        if self.queue is not None and self.elastic:
            raise RequestError(
                "Kueue admits clusters of a fixed size only",
                where="--queue",
                expected="one number of --nodes",
                got=f"{self.nodes[0]}:{self.nodes[1]}",
            )
        for name, value in self.env.items():
            check_variable(name, value)
        if not _QUANTITY.fullmatch(self.memory):
            raise RequestError(
                "this is not a quantity of memory",
                where="--memory",
                expected="such as 64Gi",
                got=self.memory,
            )
        if not re.fullmatch(r"\S+", self.image):
            raise RequestError(
                "this is not the name of an image", where="--image", got=repr(self.image)
            )
        path = PurePosixPath(self.mount)
        if (
            not path.is_absolute()
            or len(path.parts) < 2
            or ".." in path.parts
            or any(path.is_relative_to(reserved) for reserved in _OWN_PATHS)
        ):
            raise RequestError(
                "nothing can be mounted there",
                where="--claim",
                expected=f"an absolute path outside of {', '.join(_OWN_PATHS)}",
                got=self.mount,
            )

    @property
    def elastic(self) -> bool:
        """True if the number of workers may change."""
        return self.nodes[0] < self.nodes[1]


def check_label(
    name: str, where: str, *, most: int = 63, dots: bool = False, letter: bool = False
) -> None:
    """Check a name against the rules of Kubernetes: an RFC 1123 label, or several of them separated
    by dots.

    Args:
        name: the name.
        where: option that is named in the error.
        most: maximum length; with `dots` it is 253.
        dots: True if the name may contain dots.
        letter: True if the name must begin with a letter (RFC 1035).

    Raises:
        RequestError: the name is invalid.
    """
    most = 253 if dots else most
    labels = name.split(".") if dots else [name]
    if (
        all(_LABEL.fullmatch(label) and len(label) <= 63 for label in labels)
        and len(name) <= most
        and not (letter and name[0].isdigit())
    ):
        return
    begins = "begin with a letter and end" if letter else "begin and end"
    raise RequestError(
        "this is not a valid Kubernetes name",
        where=where,
        expected=(
            f"at most {most} of a-z, 0-9 and -{', labels with dots between' if dots else ''}, which"
            f" {begins} with a letter or digit"
        ),
        got=repr(name),
    )


def check_variable(name: str, value: str) -> None:
    """Raise RequestError, without the value, if an environment variable is invalid or looks like a
    secret.
    """
    if not _VARIABLE.fullmatch(name):
        raise RequestError(
            "this is not the name of an environment variable", where="--env", got=repr(name)
        )
    if is_secret_name(name) or HIDDEN in redacted(value):
        raise RequestError(
            f"{name} looks like a secret, which does not belong in a manifest",
            where="--env",
            hint=(
                "Put it into a Secret (kubectl create secret generic NAME --from-literal"
                f" {name}=...), and pass --secret NAME."
            ),
        )


def ray_version() -> str:
    """Return the version of Ray that is installed here, or the minimum version that trainload
    requires.
    """
    try:
        return version("ray")
    except PackageNotFoundError:
        requirement = next(
            Requirement(text)
            for text in requires("trainload") or ()
            if Requirement(text).name == "ray"
        )
        least = next(each.version for each in requirement.specifier if each.operator == ">=")
        return ".".join([*least.split("."), "0", "0"][:3])


def entrypoint(run_dir: str, options: Sequence[str], before: Sequence[str] = ()) -> str:
    """Return the shell command of a job: it launches a run, or resumes it if its folder exists
    already.

    The folder exists if an earlier driver of the run failed. The exit status tells KubeRay whether
    to try another cluster (cli/commands/driving.py).

    Args:
        run_dir: the run's folder, as a path in the pods, or its URL.
        options: arguments of `trainload launch`, except --run-dir and --address.
        before: options of `trainload` itself.
    """
    launch = [*before, "launch", *options, "--run-dir", run_dir, "--address", "auto"]
    return shlex.join(
        ["exec", "python", "-m", "trainload", "manifest", "drive", run_dir, "--", *launch]
    )


def ray_job(pods: Pods, run_dir: str, command: str, retries: int) -> Json:
    """Return a RayJob: a cluster for one run.

    Args:
        pods: its pods.
        run_dir: the run's folder, as a path in the pods, or its URL.
        command: command of the job (`entrypoint`).
        retries: number of further clusters that are tried if the job fails.
    """
    check_label(pods.name, "--name", most=LONGEST_NAME["RayJob"], letter=True)
    spec = ray_job_spec(
        pods, command, ["python", "-m", "trainload", "manifest", "evict", run_dir], retries
    )
    spec |= suspended(pods)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata_of(pods),
        "spec": spec,
    }


def ray_job_spec(
    pods: Pods, command: str, before_head_ends: list[str] | None, retries: int
) -> Json:
    """Return the spec of a RayJob.

    `before_head_ends` is a command that runs on the head's pod before it is terminated.
    """
    return {
        "entrypoint": command,
        "submissionMode": "HTTPMode",
        "backoffLimit": retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
        "rayClusterSpec": _cluster(pods, before_head_ends),
    }


def ray_cluster(pods: Pods) -> Json:
    """Return a RayCluster, which exists until it is deleted."""
    check_label(pods.name, "--name", most=LONGEST_NAME["RayCluster"], letter=True)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata_of(pods),
        "spec": {**_cluster(pods, None), **suspended(pods)},
    }


def suspended(pods: Pods) -> Json:
    """Return the field that leaves the start to Kueue, if the pods have a queue."""
    return {} if pods.queue is None else {"suspend": True}


def metadata_of(pods: Pods) -> Json:
    """Return the metadata of an object: name, namespace and labels."""
    place = {} if pods.namespace is None else {"namespace": pods.namespace}
    labels = {"app.kubernetes.io/managed-by": "trainload"}
    if pods.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = pods.queue
    if pods.priority is not None:
        labels["kueue.x-k8s.io/priority-class"] = pods.priority
    return {"name": pods.name, **place, "labels": labels}


def _cluster(pods: Pods, before_head_ends: list[str] | None) -> Json:
    cpus = pods.devices * CPUS_PER_GPU if pods.gpu else pods.devices
    worker_limits = device_limits(pods)
    store = {"object-store-memory": str(_OBJECT_STORE_BYTES)}
    spec: Json = {"rayVersion": pods.ray or ray_version(), "authOptions": {"mode": "token"}}
    if pods.elastic:
        spec |= {
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {"version": "v2", "securityContext": _security_context()},
        }
    # The head offers no CPUs to Ray, so that ranks run on workers only.
    head = _template(
        pods,
        "ray-head",
        HEAD_CPUS,
        {"memory": HEAD_MEMORY},
        1,
        before_head_ends,
        token=pods.elastic,
    )
    spec["headGroupSpec"] = {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **store},
        "template": head,
    }
    spec["workerGroupSpecs"] = [
        {
            "groupName": "workers",
            "replicas": pods.nodes[0],
            "minReplicas": pods.nodes[0],
            "maxReplicas": pods.nodes[1],
            "rayStartParams": {"num-cpus": str(cpus), **_gpu_count(pods), **store},
            "template": _template(
                pods, "ray-worker", cpus, worker_limits, pods.devices, None, token=False
            ),
        }
    ]
    return spec


def device_limits(pods: Pods) -> Json:
    """Return the memory and GPUs of each worker, which are requested and limited alike."""
    return {"memory": pods.memory} | ({pods.gpu_resource: pods.devices} if pods.gpu else {})


def _gpu_count(pods: Pods) -> dict[str, str]:
    """Return the option that tells Ray the number of GPUs where KubeRay does not derive it."""
    derived = pods.gpu_resource.endswith("gpu")
    return {"num-gpus": str(pods.devices)} if pods.gpu and not derived else {}


def _template(
    pods: Pods,
    name: str,
    cpus: int,
    limits: Mapping[str, object],
    ranks: int,
    before_end: list[str] | None,
    *,
    token: bool,
) -> Json:
    """Return the template of a pod. `token` is True if it uses the Kubernetes API."""
    container = container_of(pods, name, cpus, limits)
    if before_end is not None:
        container["lifecycle"] = {"preStop": {"exec": {"command": before_end}}}
    return {"spec": pod_of(pods, container, ranks=ranks, token=token)}


def container_of(pods: Pods, name: str, cpus: int, limits: Mapping[str, object]) -> Json:
    """Return a container with the pods' image, storage and variables.

    Args:
        pods: description of the pods.
        name: name of the container.
        cpus: requested CPUs.
        limits: other resources, as requests and limits.
    """
    container: Json = {
        "name": name,
        "image": pods.image,
        # CPUs are not limited: a throttled rank would slow down all others.
        "resources": {"requests": {"cpu": cpus, **limits}, "limits": dict(limits)},
        "env": _variables(pods),
        "securityContext": _security_context(),
        "volumeMounts": [
            *([] if pods.claim is None else [{"name": "storage", "mountPath": pods.mount}]),
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": _CACHE},
        ],
    }
    if pods.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in pods.secrets]
    return container


def pod_of(pods: Pods, container: Json, *, ranks: int, token: bool) -> Json:
    """Return a pod with one container.

    Its shared memory is sized for `ranks` ranks; `token` is True if it uses the Kubernetes API.
    """
    shared_memory = f"{_SHARED_MEMORY_MIB * (1 + ranks)}Mi"
    claim = {"name": "storage", "persistentVolumeClaim": {"claimName": pods.claim}}
    pod: Json = {
        "automountServiceAccountToken": token,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _GROUP,
            "fsGroup": _GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            *([] if pods.claim is None else [claim]),
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
            {"name": "cache", "emptyDir": {}},
        ],
    }
    if pods.service_account is not None:
        pod["serviceAccountName"] = pods.service_account
    return pod


def _variables(pods: Pods) -> list[Json]:
    defaults = {
        "TRAINLOAD_CACHE_DIR": _CACHE,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS),
    }
    return [{"name": name, "value": value} for name, value in (defaults | dict(pods.env)).items()]


def _security_context() -> Json:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def as_yaml(*manifests: Json) -> str:
    """Return manifests as YAML for kubectl."""
    import yaml

    text: str = yaml.safe_dump_all(manifests, sort_keys=False, width=120)
    return text
