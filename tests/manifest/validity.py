"""Validate manifests with the schemas of Kubernetes and of Kubeflow Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

Json = dict[str, Any]
SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema/v1.37.0-local-strict"
MODELS = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}


def templates(value: Any) -> Iterator[Json]:
    """Yield the templates of pods in a manifest."""
    if isinstance(value, list):
        for each in value:
            yield from templates(each)
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
            return
        for each in value.values():
            yield from templates(each)


def check_valid(manifest: Json) -> None:
    """Validate a manifest's pods, a CronJob, or an object of Kubeflow Trainer, without unknown
    fields.
    """
    if manifest["kind"] == "CronJob":
        _check(manifest)
    if manifest["kind"] in MODELS:
        model = MODELS[manifest["kind"]].from_dict(manifest)
        assert model is not None
        assert _plain(model.to_dict()) == _plain(manifest), "there are unknown fields"
    for template in templates(manifest):
        metadata = {"name": "pod", **template.get("metadata", {})}
        _check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def _check(document: Json) -> None:
    group = document["apiVersion"].rpartition("/")[0] or "core"
    name = f"io.k8s.api.{group}.{document['apiVersion'].rpartition('/')[2]}.{document['kind']}"
    errors = [
        f"{each.json_path}: {each.message}" for each in _validator(name).iter_errors(document)
    ]
    assert errors == [], errors


@cache
def _validator(name: str) -> Draft202012Validator:
    """Return the validator of a kind; the library itself would read all schemas for each call."""
    definitions = _definitions()
    reference = {"$ref": f"/api/_definitions.json#/$defs/{name}"}
    registry = Registry().with_resource("/api/_definitions.json", definitions)
    return Draft202012Validator(reference, registry=registry)


@cache
def _definitions() -> Resource[Any]:
    text = (SCHEMAS / "_definitions.json").read_text()
    return Resource.from_contents(json.loads(text), default_specification=DRAFT202012)


def _plain(value: Any) -> Any:
    """Return a value without what models add or convert: None, and quantities in objects."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(float(value)) if is_number else value
