"""Validate all kinds of manifests, with and without misspellings, with the schemas of KubeRay and
Kubeflow Trainer.

    python -m tests.manifest.crds FOLDER

FOLDER contains ray.io_rayjobs.yaml, ray.io_rayclusters.yaml and ray.io_raycronjobs.yaml:
helm-chart/kuberay-operator/crds of the repository ray-project/kuberay; and
trainer.kubeflow.org_trainjobs.yaml and trainer.kubeflow.org_trainingruntimes.yaml:
manifests/base/crds of the repository kubeflow/trainer. The schemas must report a misspelling of
every field.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import relevance
from tests.manifest.variants import manifests

FILES = {
    "RayJob": ("ray.io_rayjobs.yaml", "v1"),
    "RayCluster": ("ray.io_rayclusters.yaml", "v1"),
    "RayCronJob": ("ray.io_raycronjobs.yaml", "v1"),
    "TrainJob": ("trainer.kubeflow.org_trainjobs.yaml", "v1alpha1"),
    "TrainingRuntime": ("trainer.kubeflow.org_trainingruntimes.yaml", "v1alpha1"),
}


def strict_schema(crd: dict[str, Any], version: str) -> dict[str, Any]:
    """Return one version's schema of a definition, with unknown fields as errors.

    Kubernetes would drop them.
    """
    found = next(
        each for each in crd["spec"]["versions"] if each["name"] == version and each["served"]
    )
    schema: dict[str, Any] = _closed(found["schema"]["openAPIV3Schema"])
    # The metadata that every object has is not part of the definition.
    schema["properties"]["metadata"] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "namespace": {"type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    }
    return schema


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(each) for name, each in schema.items()}
    named = isinstance(found.get("properties"), dict) and found.get("type") == "object"
    if (
        named
        and "additionalProperties" not in found
        and not found.get("x-kubernetes-preserve-unknown-fields")
    ):
        found["additionalProperties"] = False
    return found


def problems(schema: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Return the errors of a manifest, most relevant first."""
    errors = sorted(Draft202012Validator(schema).iter_errors(manifest), key=relevance, reverse=True)
    return [f"{error.json_path}: {error.message}" for error in errors]


def misspelt(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the manifest with one field misspelled, for each field.

    Keys of maps of strings are not fields.
    """
    free = ("labels", "rayStartParams", "requests", "limits")
    places = list(_names(manifest, ()))
    for *path, name in places:
        if path and path[-1] in free:
            continue
        other = copy.deepcopy(manifest)
        inner: Any = other
        for step in path:
            inner = inner[step]
        inner[f"{name}x"] = inner.pop(name)
        yield ".".join(map(str, [*path, name])), other


def _names(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in pairs:
        if isinstance(value, dict):
            yield (*path, key)
        yield from _names(inner, (*path, key))


def main(folder: Path) -> int:
    """Run the checks. Returns the exit status."""
    schemas = {
        kind: strict_schema(yaml.safe_load((folder / name).read_text()), version)
        for kind, (name, version) in FILES.items()
    }
    wrong = 0
    for name, manifest in manifests().items():
        found = problems(schemas[manifest["kind"]], manifest)
        typos = {
            place: problems(schemas[manifest["kind"]], other) for place, other in misspelt(manifest)
        }
        missed = [place for place, said in typos.items() if not said]
        said = "valid" if not found else found[0]
        print(
            f"{name}: {manifest['kind']}, {said}; {len(typos) - len(missed)} of {len(typos)}"
            " misspellings found"
        )
        wrong += bool(found) + bool(missed)
        for place in missed:
            print(f"  not found: {place}")
    print(f"{len(manifests()) - wrong} passed, {wrong} failed")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
