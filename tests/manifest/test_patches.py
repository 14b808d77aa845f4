"""Patches of manifests: strategic merge and JSON patches, their targets, and their errors."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manifest.variants import JOB, LEAST

from trainload.cli import main as cli
from trainload.core.errors import RequestError
from trainload.deploy.patches import patch_of, patched
from trainload.deploy.strategic_merge import MERGE_KEYS, merged

Capture = pytest.CaptureFixture[str]
OF_CUSTOM_RESOURCES = {"workerGroupSpecs", "replicatedJobs"}
WORKERS = {
    "kind": "RayJob",
    "spec": {
        "rayClusterSpec": {
            "workerGroupSpecs": [
                {
                    "groupName": "workers",
                    "template": {
                        "spec": {
                            "nodeSelector": {"pool": "h200"},
                            "tolerations": [{"key": "gpu", "operator": "Exists"}],
                            "imagePullSecrets": [{"name": "registry"}],
                            "containers": [
                                {
                                    "name": "ray-worker",
                                    "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
                                    "resources": {"limits": {"rdma/hca": 1}},
                                }
                            ],
                        }
                    },
                }
            ]
        }
    },
}


def applied(
    capsys: Capture, tmp_path: Path, *patches: Any, options: tuple[str, ...] = JOB
) -> dict[str, Any]:
    """Return the manifest of a job with patches."""
    words = list(options)
    for number, patch in enumerate(patches):
        path = tmp_path / f"{number}.yaml"
        path.write_text(patch if isinstance(patch, str) else yaml.safe_dump(patch))
        words += ["--patch", str(path)]
    status = cli.run(["manifest", "kuberay", *words])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    manifest: dict[str, Any] = yaml.safe_load(printed.out)
    return manifest


def rejected(capsys: Capture, tmp_path: Path, patch: Any) -> str:
    """Return the error message of a patch."""
    path = tmp_path / "patch.yaml"
    path.write_text(patch if isinstance(patch, str) else yaml.safe_dump(patch))
    assert cli.run(["manifest", "kuberay", *JOB, "--patch", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return " ".join(printed.err.split())


def worker(manifest: dict[str, Any]) -> dict[str, Any]:
    (group,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod: dict[str, Any] = group["template"]["spec"]
    return pod


def test_a_patch_changes_the_container_that_it_names_and_keeps_the_rest(
    capsys: Capture, tmp_path: Path
) -> None:
    before, after = applied(capsys, tmp_path), applied(capsys, tmp_path, WORKERS)
    (old,), (new,) = worker(before)["containers"], worker(after)["containers"]
    assert new["env"] == [*old["env"], {"name": "NCCL_IB_HCA", "value": "mlx5"}]
    assert new["resources"]["limits"] == {"memory": "16Gi", "rdma/hca": 1}
    assert new["resources"]["requests"] == old["resources"]["requests"]
    assert worker(after)["nodeSelector"] == {"pool": "h200"}
    assert worker(after)["volumes"] == worker(before)["volumes"]


def test_a_variable_with_the_same_name_is_replaced(capsys: Capture, tmp_path: Path) -> None:
    patch = copy.deepcopy(WORKERS)
    group: Any = patch["spec"]
    (container,) = group["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    container["env"] = [{"name": "TRAINLOAD_CACHE_DIR", "value": "/nvme"}]
    (found,) = worker(applied(capsys, tmp_path, patch))["containers"]
    values = [each["value"] for each in found["env"] if each["name"] == "TRAINLOAD_CACHE_DIR"]
    assert values == ["/nvme"]


def test_a_json_patch_has_a_target(capsys: Capture, tmp_path: Path) -> None:
    operations = [{"op": "add", "path": "/metadata/annotations", "value": {"team": "research"}}]
    patch = {"target": {"kind": "RayJob", "name": "gpt"}, "patch": operations}
    assert applied(capsys, tmp_path, patch)["metadata"]["annotations"] == {"team": "research"}
    assert applied(capsys, tmp_path, operations) == applied(capsys, tmp_path, patch)


def test_a_file_has_several_patches_and_may_be_json(capsys: Capture, tmp_path: Path) -> None:
    text = 'spec: {backoffLimit: 7}\n---\n[{"op": "remove", "path": "/spec/backoffLimit"}]\n'
    assert "backoffLimit" not in applied(capsys, tmp_path, text)["spec"]
    patch = json.dumps({"spec": {"backoffLimit": 7}})
    assert applied(capsys, tmp_path, patch)["spec"]["backoffLimit"] == 7


def test_patches_are_applied_in_order(capsys: Capture, tmp_path: Path) -> None:
    patches = [{"spec": {"backoffLimit": number}} for number in (5, 6)]
    assert applied(capsys, tmp_path, *patches)["spec"]["backoffLimit"] == 6


def test_a_retraining_can_be_patched(capsys: Capture, tmp_path: Path) -> None:
    config = {"store": "s", "line": "gpt", "data": {"files": "x/*.parquet"}}
    config |= {"evaluation": {"hold_out": 0.1}, "schedule": {"cron": "30 2 * * *"}}
    (tmp_path / "retrain.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "patch.yaml").write_text("kind: CronJob\nspec: {suspend: true}\n")
    words = ["cronjob", str(tmp_path / "retrain.yaml"), "--image", "i", "--claim", "shared"]
    command = ["retrain", "manifest", *words, "--patch", str(tmp_path / "patch.yaml")]
    assert cli.run(command) == 0
    assert yaml.safe_load(capsys.readouterr().out)["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            {"kind": "RayCluster"},
            "patch.yaml: the patch is for no manifest (expected one of RayJob",
        ),
        ({"metadata": {"name": "other"}}, "RayJob gpt, got other)"),
        ("a: [", "patch.yaml: this is not YAML or JSON"),
        ("", "patch.yaml: there is no patch"),
        ("just text", "patch.yaml: this is not a patch"),
        ({"patch": {}}, "this is not a JSON patch with a target"),
        ({"spec": {"entrypoint": ["a"]}}, "patch.yaml: spec.entrypoint: a list cannot be merged"),
        ({"spec": {"rayClusterSpec": 3}}, "spec.rayClusterSpec: a value cannot replace this"),
        (
            {"spec": {"rayClusterSpec": {"workerGroupSpecs": [{"replicas": 3}]}}},
            "workerGroupSpecs: this element has no name (expected maps with groupName",
        ),
        ({"spec": {"$patch": "merge-all"}}, "spec.$patch: this directive is not supported"),
        ([{"op": "remove", "path": "/spec/x"}], "patch.yaml: /spec/x: the operation fails"),
        ([{"op": "leave", "path": "/spec"}], "patch.yaml: /spec: the operation fails"),
        (["text"], "the operation fails"),
        (
            [{"op": "replace", "path": "/metadata/name", "value": "x"}],
            "metadata.name: a patch cannot change this",
        ),
        ([{"op": "test", "path": "/kind", "value": "RayCluster"}], "/kind: the operation fails"),
    ],
)
def test_an_error_names_the_file_and_the_path(
    patch: Any, message: str, capsys: Capture, tmp_path: Path
) -> None:
    assert message in rejected(capsys, tmp_path, patch)


def test_a_secret_in_a_patch_is_rejected_without_its_value(capsys: Capture, tmp_path: Path) -> None:
    text = yaml.safe_dump(WORKERS).replace("NCCL_IB_HCA", "API_TOKEN").replace("mlx5", "hunter2000")
    message = rejected(capsys, tmp_path, text)
    assert "API_TOKEN looks like a secret" in message
    assert "secretKeyRef" in message
    assert "hunter2000" not in message


def test_null_removes_a_field(tmp_path: Path) -> None:
    assert merged({"a": 1, "b": {"c": 1, "d": 2}}, {"a": None, "b": {"c": None}}) == {"b": {"d": 2}}


def test_an_element_is_removed_by_its_name() -> None:
    document = {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]}
    patch = {"volumes": [{"$patch": "delete", "name": "a"}]}
    assert merged(document, patch)["volumes"] == [{"name": "b", "emptyDir": {}}]


def test_a_list_and_a_map_can_be_replaced() -> None:
    document = {"env": [{"name": "A", "value": "1"}], "limits": {"memory": "1Gi"}}
    patch = {"env": [{"$patch": "replace"}, {"name": "B"}], "limits": {"$patch": "replace", "x": 1}}
    assert merged(document, patch) == {"env": [{"name": "B"}], "limits": {"x": 1}}


def test_the_source_of_a_volume_can_be_exchanged() -> None:
    document = {"volumes": [{"name": "cache", "emptyDir": {}}]}
    source = {"hostPath": {"path": "/nvme"}}
    patch = {"volumes": [{"name": "cache", "$retainKeys": ["name", "hostPath"], **source}]}
    assert merged(document, patch)["volumes"] == [{"name": "cache", **source}]


def test_tolerations_are_replaced_as_in_kubernetes() -> None:
    document = {"tolerations": [{"key": "a"}]}
    assert merged(document, {"tolerations": [{"key": "b"}]}) == {"tolerations": [{"key": "b"}]}


def test_lists_of_pods_have_the_merge_keys_of_kubernetes() -> None:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema/v1.37.0-local"
    keys: dict[str, str] = {}
    for name in ("podspec-v1", "container-v1"):
        schema = json.loads((folder / f"{name}.json").read_text())["properties"]
        keys |= {
            field: each["x-kubernetes-patch-merge-key"]
            for field, each in schema.items()
            if "x-kubernetes-patch-merge-key" in each
        }
    ours = {name: key for name, key in MERGE_KEYS.items() if name not in OF_CUSTOM_RESOURCES}
    assert ours == {name: key for name, key in keys.items() if name in ours}
    assert keys.keys() - ours.keys() <= {"evictionResponders"}  # new in 1.37


NAMES = st.sampled_from(["a", "b", "c"])
LEAVES = st.integers(0, 3) | st.booleans() | st.text("xy", max_size=2)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": NAMES}, optional={"image": LEAVES, "args": st.lists(st.integers(0, 3))}
    ),
    unique_by=lambda each: str(each["name"]),
    max_size=3,
)
MAPS = st.dictionaries(NAMES, LEAVES, max_size=3)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "labels": MAPS,
        "containers": CONTAINERS,
        "inner": st.fixed_dictionaries({"m": MAPS}),
    },
)


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return path -> leaf; elements of named lists are addressed by their names."""
    if isinstance(value, dict):
        return {
            k: v for name, each in value.items() for k, v in leaves(each, (*path, name)).items()
        }
    if isinstance(value, list) and path[-1:] == ("containers",):
        return {k: v for each in value for k, v in leaves(each, (*path, str(each["name"]))).items()}
    return {path: value}


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_without_nulls_sets_its_fields_and_loses_no_other(
    document: dict[str, Any], patch: dict[str, Any]
) -> None:
    before = copy.deepcopy(document)
    assert leaves(merged(document, patch)) == {**leaves(document), **leaves(patch)}
    assert document == before


KEYS = st.sampled_from(["env", "spec", "name", "kind", "$patch", "$retainKeys", "metadata"])
ANYTHING = st.recursive(
    st.none() | LEAVES | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
MANIFEST = {"kind": "RayJob", "metadata": {"name": "gpt"}, "spec": {"env": [{"name": "a"}]}}


@given(ANYTHING)
@settings(max_examples=200)
def test_any_patch_is_applied_or_rejected_with_its_place(content: Any) -> None:
    found, error = MANIFEST, None
    try:
        (found,) = patched([MANIFEST], [patch_of("patch.yaml", content)])
    except RequestError as rejected_with:
        error = rejected_with
    assert found["kind"] == "RayJob"
    assert error is None or error.where.startswith("patch.yaml")


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_applied_twice_is_applied_once(
    document: dict[str, Any], patch: dict[str, Any]
) -> None:
    once = merged(document, patch)
    assert merged(once, patch) == once


def test_a_queue_labels_and_suspends_the_job(capsys: Capture, tmp_path: Path) -> None:
    found = applied(capsys, tmp_path, options=(*JOB, "--queue", "research:high"))
    labels = found["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    assert found["spec"]["suspend"] is True
    cluster = ("--kind", "RayCluster", *LEAST, "--queue", "research")
    assert applied(capsys, tmp_path, options=cluster)["spec"]["suspend"] is True


def test_a_queue_and_an_elastic_range_are_rejected(capsys: Capture) -> None:
    words = [*JOB, "--queue", "research", "--nodes", "1:4"]
    assert cli.run(["manifest", "kuberay", *words]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "--queue: Kueue admits clusters of a fixed size only" in message


@pytest.mark.parametrize(
    ("resource", "told"),
    [("amd.com/gpu", None), ("habana.ai/gaudi", "8"), ("nvidia.com/gpu", None)],
)
def test_gpus_of_other_vendors_have_their_resource(
    resource: str, told: str | None, capsys: Capture, tmp_path: Path
) -> None:
    found = applied(capsys, tmp_path, options=(*JOB, "--workers", f"8/{resource}"))
    (container,) = worker(found)["containers"]
    assert container["resources"]["limits"][resource] == 8
    (group,) = found["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["rayStartParams"].get("num-gpus") == told
    assert re.search(r"--workers 8/cuda\b", found["spec"]["entrypoint"])


def test_an_invalid_resource_is_rejected(capsys: Capture) -> None:
    assert cli.run(["manifest", "kuberay", *JOB, "--workers", "8/amd.com/"]) == 2
    assert "--workers: this is not a resource of Kubernetes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operation", "place", "problem"),
    [
        ({"op": "add", "path": "/spec/no/such", "value": 1}, "/spec/no/such", "'no' not found"),
        ({"op": "move", "from": "/spec/no", "path": "/spec/x"}, "/spec/no to /spec/x", "'no'"),
        ({"op": "copy", "from": "/spec/no", "path": "/spec/x"}, "/spec/no to /spec/x", "'no'"),
    ],
    ids=lambda value: value["op"] if isinstance(value, dict) else "",
)
def test_a_missing_path_is_named_without_the_manifest(
    operation: dict[str, Any], place: str, problem: str
) -> None:
    manifest = {"kind": "RayJob", "metadata": {"name": "gpt"}, "spec": {"other": "contents"}}
    with pytest.raises(RequestError) as caught:
        patched([manifest], [patch_of("patch.yaml", [operation])])
    assert caught.value.where == f"patch.yaml: {place}"
    assert problem in caught.value.problem
    assert "contents" not in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "annotations"),
    [
        ({"op": "replace", "path": "/metadata/annotations/a~1b", "value": "3"}, {"a/b": "3"}),
        ({"op": "add", "path": "/metadata/annotations/c~0d", "value": "3"}, {"c~d": "3"}),
        ({"op": "add", "path": "/metadata/annotations/e~01", "value": "3"}, {"e~1": "3"}),
    ],
    ids=["slash", "tilde", "tilde and one"],
)
def test_escapes_of_a_path_name_keys_with_slashes_and_tildes(
    operation: dict[str, Any], annotations: dict[str, str]
) -> None:
    metadata = {"name": "gpt", "annotations": {"a/b": "1"}}
    manifest = {"kind": "RayJob", "metadata": metadata}
    found = patched([manifest], [patch_of("patch.yaml", [operation])])
    assert found[0]["metadata"]["annotations"] == {"a/b": "1", **annotations}
