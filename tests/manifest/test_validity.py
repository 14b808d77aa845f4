"""Properties of all manifests: any combination of options is valid, patched or not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manifest.validity import Json, check_valid, templates

from trainload.core.errors import RequestError
from trainload.deploy.kubeflow import torchrun_command, train_job
from trainload.deploy.kuberay import Pods, as_yaml, entrypoint, ray_cluster, ray_job
from trainload.deploy.patches import Patch, patched, read_patches
from trainload.deploy.schedulers import cron_job, ray_cron_job
from trainload.retraining.config.config import Timing

LABELS = st.sampled_from(["a", "gpt-7b", "team.research"])
PODS = st.builds(
    Pods,
    name=st.sampled_from(["gpt", "gpt-7b"]),
    image=st.just("registry.example/trainload:1"),
    nodes=st.sampled_from([(1, 1), (4, 4)]),
    devices=st.integers(1, 8),
    gpu=st.booleans(),
    memory=st.sampled_from(["64Gi", "512M"]),
    claim=st.none() | LABELS,
    namespace=st.none() | st.just("research"),
    secrets=st.lists(LABELS, unique=True, max_size=2).map(tuple),
    env=st.dictionaries(st.sampled_from(["A", "NCCL_DEBUG"]), st.text("a b", max_size=3)),
    service_account=st.none() | LABELS,
    gpu_resource=st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi"]),
    queue=st.none() | LABELS,
    priority=st.none() | LABELS,
)
TIMING = Timing(every=timedelta(days=1))
SPEC = {
    "nodeSelector": {"pool": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "high",
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
}
CONTAINER = {
    "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
    "resources": {"limits": {"rdma/hca": 1}, "requests": {"rdma/hca": 1}},
    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
}


def manifests(pods: Pods) -> list[Json]:
    """Return the manifests of all kinds for these pods."""
    options = ["/trainload/gpt.tl", "--data", "/trainload/train.parquet"]
    return [
        ray_job(pods, "/run", entrypoint("/run", options), 3),
        ray_cluster(pods),
        cron_job(pods, TIMING, ["trainload", "retrain", "tick", "/trainload/retrain.yaml"]),
        ray_cron_job(pods, TIMING, ["trainload", "retrain", "tick", "/trainload/retrain.yaml"]),
        *train_job(pods, torchrun_command("/run", options), 3),
    ]


def patch_of(manifest: Json) -> Json:
    """Return a patch of every pod of a manifest, with the same structure."""
    found = _patch_of(manifest)
    return {"kind": manifest["kind"], **found} if isinstance(found, dict) else {}


def _patch_of(value: Any) -> Any:
    if isinstance(value, list):
        inner = [(each, _patch_of(each)) for each in value if isinstance(each, dict)]
        names = ("name", "groupName")
        return [
            {**{name: each[name] for name in names if name in each}, **patch}
            for each, patch in inner
            if patch
        ]
    if not isinstance(value, dict):
        return None
    if "containers" in value:
        return {
            **SPEC,
            "containers": [{"name": each["name"], **CONTAINER} for each in value["containers"]],
        }
    found = {name: _patch_of(each) for name, each in value.items()}
    return {name: each for name, each in found.items() if each}


def subset(part: Any, whole: Any) -> bool:
    """Return True if all fields and elements of a value are in another one."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and subset(each, whole[name]) for name, each in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and all(
            any(subset(each, other) for other in whole) for each in part
        )
    return bool(part == whole)


@given(PODS)
@settings(max_examples=6)
def test_any_combination_of_options_is_valid(pods: Pods) -> None:
    for manifest in manifests(pods):
        check_valid(manifest)
        assert list(yaml.safe_load_all(as_yaml(manifest))) == [manifest]


@given(PODS)
@settings(max_examples=6)
def test_a_patched_manifest_is_valid_and_has_all_that_it_had(pods: Pods) -> None:
    for manifest in manifests(pods):
        patch = patch_of(manifest)
        (found,) = patched([manifest], [Patch("patch.yaml", None, None, patch)])
        assert subset(manifest, found)
        assert subset(patch, found)
        if any(True for _ in templates(manifest)):
            check_valid(found)


def test_a_misspelled_field_of_a_patch_is_invalid(tmp_path: Path) -> None:
    """Misspelled fields of manifests are found by the validation of these tests."""
    pods = Pods(name="a", image="i", nodes=(1, 1), devices=1, gpu=False, memory="1Gi", claim=None)
    (tmp_path / "patch.yaml").write_text(
        "spec: {headGroupSpec: {template: {spec: {nodeSelectors: {a: b}}}}}"
    )
    (found,) = patched([ray_cluster(pods)], read_patches(tmp_path / "patch.yaml"))
    with pytest.raises(AssertionError, match="nodeSelectors"):
        check_valid(found)


def test_a_queue_needs_a_fixed_size() -> None:
    with pytest.raises(RequestError, match="fixed size"):
        Pods(
            name="a",
            image="i",
            nodes=(1, 2),
            devices=1,
            gpu=False,
            memory="1Gi",
            claim=None,
            queue="q",
        )
