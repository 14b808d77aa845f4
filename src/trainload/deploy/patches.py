"""Patches of manifests: files with strategic merge patches or JSON patches (RFC 6902).

# merged into every RayJob
kind: RayJob
spec:
  rayClusterSpec:
    workerGroupSpecs:
    - groupName: workers
      template: {spec: {nodeSelector: {pool: h200}}}
---
target: {kind: RayJob, name: gpt}
patch:
- {op: add, path: /metadata/annotations, value: {team: research}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonpatch import JsonPatch, JsonPatchException
from jsonpointer import JsonPointerException

from trainload.core.errors import RequestError, StorageError
from trainload.core.redaction import HIDDEN, is_secret_name, redacted
from trainload.deploy.strategic_merge import merged

Json = dict[str, Any]
_MOST_BYTES = 2**20
_DOCUMENT = re.compile(r" in [\[{]")
_IDENTITY = ("apiVersion", "kind", "metadata.name", "metadata.namespace")


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch, and the manifests that it is for.

    Attributes:
        where: file, and number of the document if the file has several.
        kind: kind of the manifests; None for all.
        name: name of the manifest; None for all.
        content: a map for a strategic merge patch, a list for a JSON patch.
    """

    where: str
    kind: str | None
    name: str | None
    content: Mapping[str, Any] | Sequence[Any]

    def selects(self, manifest: Json) -> bool:
        """Return True if the patch is for this manifest."""
        return self.kind in (None, manifest["kind"]) and self.name in (
            None,
            manifest["metadata"]["name"],
        )


def read_patches(path: Path) -> list[Patch]:
    """Read a file with one or more patches.

    Raises:
        StorageError: it cannot be read.
        RequestError: it is not YAML or JSON, or a document is no patch.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise StorageError(f"it cannot be read: {error.strerror}", where=str(path)) from error
    if len(text) > _MOST_BYTES:
        raise RequestError(
            "the file is too large for a patch", where=str(path), expected=f"{_MOST_BYTES} bytes"
        )
    try:
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        got = " ".join(str(error).split())
        raise RequestError("this is not YAML or JSON", where=str(path), got=got) from error
    if not documents:
        raise RequestError("there is no patch", where=str(path), expected="a map or a list")
    names = [
        f"{path}" if len(documents) == 1 else f"{path}, document {number}"
        for number in range(1, len(documents) + 1)
    ]
    return [patch_of(name, document) for name, document in zip(names, documents, strict=True)]


def patch_of(where: str, document: Any) -> Patch:
    """Return the patch of a parsed document. Raises RequestError if it is none."""
    if isinstance(document, list):
        return Patch(where, None, None, document)
    if not isinstance(document, dict):
        raise RequestError(
            "this is not a patch",
            where=where,
            expected="a map (strategic merge patch) or a list of operations (JSON patch)",
            got=repr(document)[:200],
        )
    if "patch" in document:
        target, operations = document.get("target", {}), document["patch"]
        if (
            set(document) - {"target", "patch"}
            or not isinstance(target, dict)
            or set(target) - {"kind", "name"}
            or not isinstance(operations, list)
        ):
            raise RequestError(
                "this is not a JSON patch with a target",
                where=where,
                expected="target: {kind: KIND, name: NAME}, and patch: a list of operations",
                got=", ".join(map(str, document)),
            )
        return Patch(where, target.get("kind"), target.get("name"), operations)
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return Patch(where, document.get("kind"), name, document)


def patched(manifests: Sequence[Json], patches: Sequence[Patch]) -> list[Json]:
    """Return manifests with patches applied, in order.

    Args:
        manifests: the manifests, which are not changed.
        patches: patches.

    Raises:
        RequestError: a patch selects no manifest, does not fit, changes the identity of one, or
            would write a secret into it. `where` is the patch's file and path.
    """
    found = list(manifests)
    for patch in patches:
        places = [at for at, manifest in enumerate(found) if patch.selects(manifest)]
        if not places:
            wanted = [str(text) for text in (patch.kind, patch.name) if text is not None]
            raise RequestError(
                "the patch is for no manifest",
                where=patch.where,
                expected="one of "
                + ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in found),
                got=" ".join(wanted),
            )
        for at in places:
            found[at] = _apply(patch, found[at])
    return found


def _apply(patch: Patch, manifest: Json) -> Json:
    if isinstance(patch.content, Mapping):
        try:
            result = merged(manifest, patch.content)
        except RequestError as error:
            raise RequestError(
                error.problem,
                where=f"{patch.where}: {error.where}",
                expected=error.expected,
                got=error.got,
            ) from error
    else:
        result = _apply_operations(patch, patch.content, manifest)
    _check_identity(patch, manifest, result)
    _check_no_secrets(patch, manifest, result)
    return result


def _apply_operations(patch: Patch, operations: Sequence[Any], manifest: Json) -> Json:
    """Apply a JSON patch, operation by operation, such that an error names one."""
    result = manifest
    for operation in operations:
        try:
            result = JsonPatch([operation]).apply(result)
        except (JsonPatchException, JsonPointerException, TypeError) as error:
            is_map = isinstance(operation, dict)
            # some messages end with the whole document
            problem = _DOCUMENT.split(str(error))[0]
            raise RequestError(
                f"the operation fails: {problem}",
                where=f"{patch.where}: {_places(operation) if is_map else ''}",
                expected="an operation of RFC 6902, on an existing path",
                got=str(operation.get("op")) if is_map else type(operation).__name__,
            ) from error
    if not isinstance(result, dict):
        raise RequestError("nothing of the manifest is left", where=patch.where)
    return result


def _places(operation: Mapping[str, Any]) -> str:
    """Return the path of an operation, after the one that it copies or moves from."""
    path = str(operation.get("path", ""))
    return f"{operation['from']} to {path}" if "from" in operation else path


def _check_identity(patch: Patch, before: Json, after: Json) -> None:
    """Check that kind, name and namespace are the same, which other parts refer to."""
    for path in _IDENTITY:
        old, new = _field(before, path), _field(after, path)
        if old != new:
            raise RequestError(
                "a patch cannot change this",
                where=f"{patch.where}: {path}",
                expected=str(old),
                got=str(new),
                hint="Use the options --name and --namespace.",
            )


def _field(manifest: Json, path: str) -> Any:
    value: Any = manifest
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _check_no_secrets(patch: Patch, before: Json, after: Json) -> None:
    """Check the environment variables that a patch adds, like those of --env."""
    known = set(_variables(before))
    for name, value in _variables(after):
        if (name, value) not in known and (is_secret_name(name) or HIDDEN in redacted(value)):
            raise RequestError(
                f"{name} looks like a secret, which does not belong in a manifest",
                where=patch.where,
                hint="Refer to a Secret: valueFrom: {secretKeyRef: {name: NAME, key: KEY}}.",
            )


def _variables(value: Any) -> Iterator[tuple[str, str]]:
    """Yield names and values of all environment variables in a manifest."""
    if isinstance(value, list):
        for each in value:
            yield from _variables(each)
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "env" and isinstance(inner, list):
                yield from (
                    (str(each["name"]), str(each["value"]))
                    for each in inner
                    if isinstance(each, dict) and "name" in each and "value" in each
                )
            yield from _variables(inner)
