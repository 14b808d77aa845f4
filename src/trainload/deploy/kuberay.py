"""Manifests for KubeRay: a cluster of pods, and a run on one, as data for `kubectl apply`.

What is here was taken from KubeRay 1.6 and 1.7 and from Ray 2.60; `make kuberay CRDS=FOLDER` holds it against KubeRay's own schemas.

- The job is submitted over HTTP, so that its entrypoint reaches Ray as it stands here, and is submitted again where the head was replaced.
- A pod that is to go gets SIGTERM. `ray start --block` then drains its node, and waits; the run saves what it has, or goes elsewhere.
- A job that exits with another status than 0 has failed, and KubeRay makes another cluster for it, as often as it is told to.
- A cluster that may grow is given Ray's autoscaler, which a run with a range of nodes asks for the most of them. KubeRay starts a job
  when all pods that it was asked for are there, so it is asked for the fewest.
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

Kind = Literal["RayJob", "RayCluster"]
Json = dict[str, Any]

LONGEST_NAME: Mapping[Kind, int] = {"RayJob": 47, "RayCluster": 53}
"""KubeRay's: it adds to them."""
GRACE_SECONDS = 120
"""What a pod has between SIGTERM and its end."""
DRAIN_SECONDS = GRACE_SECONDS - 10
"""How long Ray waits of these for what runs on the node."""
CPUS_PER_GPU = 4
HEAD_CPUS, HEAD_MEMORY = 2, "8Gi"
_KEPT_SECONDS = 600
_OBJECT_STORE_BYTES = 256 * 2**20
_SHARED_MEMORY_MIB = 512
_USER, _GROUP = 1000, 100
_CACHE = "/cache"
_OWN_PATHS = (_CACHE, "/dev", "/proc", "/sys", "/tmp/ray")

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of a cluster: a head that drives, and workers that train.

    Attributes:
        name: of the RayJob or RayCluster.
        image: with trainload and Ray.
        nodes: the fewest and the most workers.
        devices: CPUs or GPUs of each that ranks are put on. gpu: which.
        memory: of each worker, a quantity such as 64Gi.
        claim: the PersistentVolumeClaim that all of them mount. mount: where.
        namespace: None: kubectl's.
        secrets: Secrets whose entries become environment variables.
        env: further ones, without secrets.
        service_account: None: the namespace's.
        ray: its version in the image.

    Raises:
        RequestError: a name is none, a variable is called as secrets are, or another value cannot be used.
    """

    name: str
    image: str
    nodes: tuple[int, int]
    devices: int
    gpu: bool
    memory: str
    claim: str
    mount: str = "/trainload"
    namespace: str | None = None
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    ray: str = ""

    def __post_init__(self) -> None:
        check_label(self.claim, "--claim", dots=True)
        if self.namespace is not None:
            check_label(self.namespace, "--namespace")
        if self.service_account is not None:
            check_label(self.service_account, "--service-account", dots=True)
        for name in self.secrets:
            check_label(name, "--secret", dots=True)
        for name, value in self.env.items():
            check_variable(name, value)
        if not _QUANTITY.fullmatch(self.memory):
            raise RequestError("this is not a quantity of memory", where="--memory", expected="such as 64Gi", got=self.memory)
        if not re.fullmatch(r"\S+", self.image):
            raise RequestError("this is not the name of an image", where="--image", got=repr(self.image))
        path = PurePosixPath(self.mount)
        if not path.is_absolute() or len(path.parts) < 2 or ".." in path.parts or any(path.is_relative_to(own) for own in _OWN_PATHS):
            raise RequestError(
                "nothing can be mounted there",
                where="--claim",
                expected=f"an absolute path outside of {', '.join(_OWN_PATHS)}",
                got=self.mount,
            )

    @property
    def elastic(self) -> bool:
        """Whether there may be more or fewer of them."""
        return self.nodes[0] < self.nodes[1]


def check_label(name: str, where: str, *, most: int = 63, dots: bool = False, letter: bool = False) -> None:
    """Check a name against the rules of Kubernetes: a label of RFC 1123, or labels with dots between.

    Args:
        name: the name.
        where: what it is called in the error.
        most: characters that it may have; 253 with dots.
        dots: it is the name of an object that may have them.
        letter: it begins with a letter (RFC 1035).

    Raises: RequestError.
    """
    most = 253 if dots else most
    labels = name.split(".") if dots else [name]
    if all(_LABEL.fullmatch(label) and len(label) <= 63 for label in labels) and len(name) <= most and not (letter and name[0].isdigit()):
        return
    begins = "begin with a letter and end" if letter else "begin and end"
    raise RequestError(
        "this is not a valid Kubernetes name",
        where=where,
        expected=f"at most {most} of a-z, 0-9 and -{', labels with dots between' if dots else ''}, which {begins} with a letter or digit",
        got=repr(name),
    )


def check_variable(name: str, value: str) -> None:
    """Check that an environment variable may be readable in a manifest. Raises: RequestError, without its value."""
    if not _VARIABLE.fullmatch(name):
        raise RequestError("this is not the name of an environment variable", where="--env", got=repr(name))
    if is_secret_name(name) or HIDDEN in redacted(value):
        raise RequestError(
            f"{name} looks like a secret, which does not belong in a manifest",
            where="--env",
            hint=f"Put it into a Secret (kubectl create secret generic NAME --from-literal {name}=...), and pass --secret NAME.",
        )


def ray_version() -> str:
    """Ray's that is installed here, or the least that trainload takes."""
    try:
        return version("ray")
    except PackageNotFoundError:
        asked = next(Requirement(text) for text in requires("trainload") or () if Requirement(text).name == "ray")
        least = next(each.version for each in asked.specifier if each.operator == ">=")
        return ".".join([*least.split("."), "0", "0"][:3])


def entrypoint(run_dir: str, options: Sequence[str], before: Sequence[str] = ()) -> str:
    """What a job runs: a launch, or the same run's continuation where its folder is there already, since this driver was not the first.
    How it ends tells KubeRay whether to try another cluster (`commands/driving.py`).

    Args:
        run_dir: the run's folder, as the pods see it.
        options: of `trainload launch`: the package and all others but --run-dir and --address.
        before: of `trainload` itself.
    """
    launch = [*before, "launch", *options, "--run-dir", run_dir, "--address", "auto"]
    return shlex.join(["exec", "python", "-m", "trainload", "manifest", "drive", run_dir, "--", *launch])


def ray_job(pods: Pods, run_dir: str, command: str, retries: int) -> Json:
    """A RayJob: a cluster that is there for one run.

    Args:
        pods: its pods.
        run_dir: the run's folder, as they see it.
        command: what the job runs (`entrypoint`).
        retries: how many further clusters are tried when the job has failed.
    """
    check_label(pods.name, "--name", most=LONGEST_NAME["RayJob"], letter=True)
    spec = ray_job_spec(pods, command, ["python", "-m", "trainload", "manifest", "evict", run_dir], retries)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata_of(pods), "spec": spec}


def ray_job_spec(pods: Pods, command: str, before_head_ends: list[str] | None, retries: int) -> Json:
    """What a RayJob is, without its name. before_head_ends: what is run on the head's pod before it ends. Others as of `ray_job`."""
    return {
        "entrypoint": command,
        "submissionMode": "HTTPMode",
        "backoffLimit": retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
        "rayClusterSpec": _cluster(pods, before_head_ends),
    }


def ray_cluster(pods: Pods) -> Json:
    """A RayCluster, which is there until it is deleted."""
    check_label(pods.name, "--name", most=LONGEST_NAME["RayCluster"], letter=True)
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata_of(pods), "spec": _cluster(pods, None)}


def metadata_of(pods: Pods) -> Json:
    """The name of what is made of pods, and where it is."""
    place = {} if pods.namespace is None else {"namespace": pods.namespace}
    return {"name": pods.name, **place, "labels": {"app.kubernetes.io/managed-by": "trainload"}}


def _cluster(pods: Pods, before_head_ends: list[str] | None) -> Json:
    cpus = pods.devices * CPUS_PER_GPU if pods.gpu else pods.devices
    worker_limits = {"memory": pods.memory} | ({"nvidia.com/gpu": pods.devices} if pods.gpu else {})
    store = {"object-store-memory": str(_OBJECT_STORE_BYTES)}
    spec: Json = {"rayVersion": pods.ray or ray_version(), "authOptions": {"mode": "token"}}
    if pods.elastic:
        spec |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2", "securityContext": _confined()}}
    # The head has no devices for Ray: ranks are on workers alone.
    head = _template(pods, "ray-head", HEAD_CPUS, {"memory": HEAD_MEMORY}, 1, before_head_ends, token=pods.elastic)
    spec["headGroupSpec"] = {"rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **store}, "template": head}
    spec["workerGroupSpecs"] = [
        {
            "groupName": "workers",
            "replicas": pods.nodes[0],
            "minReplicas": pods.nodes[0],
            "maxReplicas": pods.nodes[1],
            "rayStartParams": {"num-cpus": str(cpus), **store},
            "template": _template(pods, "ray-worker", cpus, worker_limits, pods.devices, None, token=False),
        }
    ]
    return spec


def _template(
    pods: Pods, name: str, cpus: int, limits: Mapping[str, object], ranks: int, before_end: list[str] | None, *, token: bool
) -> Json:
    """A pod of a cluster. `token`: it speaks with Kubernetes."""
    container = container_of(pods, name, cpus, limits)
    if before_end is not None:
        container["lifecycle"] = {"preStop": {"exec": {"command": before_end}}}
    return {"spec": pod_of(pods, container, ranks=ranks, token=token)}


def container_of(pods: Pods, name: str, cpus: int, limits: Mapping[str, object]) -> Json:
    """A container with the pods' image, storage and variables.

    Args:
        pods: whose it is.
        name: its name.
        cpus: that it asks for.
        limits: what it asks for beside them, and gets no more of.
    """
    container: Json = {
        "name": name,
        "image": pods.image,
        # CPUs are not limited: a rank that is throttled holds up all others.
        "resources": {"requests": {"cpu": cpus, **limits}, "limits": dict(limits)},
        "env": _variables(pods),
        "securityContext": _confined(),
        "volumeMounts": [
            {"name": "storage", "mountPath": pods.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": _CACHE},
        ],
    }
    if pods.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in pods.secrets]
    return container


def pod_of(pods: Pods, container: Json, *, ranks: int, token: bool) -> Json:
    """A pod of one container. ranks: whose shared memory it has. token: it speaks with Kubernetes."""
    shared_memory = f"{_SHARED_MEMORY_MIB * (1 + ranks)}Mi"
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
            {"name": "storage", "persistentVolumeClaim": {"claimName": pods.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
            {"name": "cache", "emptyDir": {}},
        ],
    }
    if pods.service_account is not None:
        pod["serviceAccountName"] = pods.service_account
    return pod


def _variables(pods: Pods) -> list[Json]:
    own = {"TRAINLOAD_CACHE_DIR": _CACHE, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_SECONDS)}
    return [{"name": name, "value": value} for name, value in (own | dict(pods.env)).items()]


def _confined() -> Json:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def as_yaml(manifest: Json) -> str:
    """A manifest, as kubectl reads it."""
    import yaml

    text: str = yaml.safe_dump(manifest, sort_keys=False, width=120)
    return text
