"""Strategic merge patches, as Kubernetes defines them: maps are merged, null removes a field, and
lists of named things are merged by their names; other lists are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainload.core.errors import RequestError

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    # of custom resources, whose patches Kubernetes itself does not merge
    "workerGroupSpecs": "groupName",
    "replicatedJobs": "name",
}
"""Lists that are merged -> the field that names their elements.

The names of pods are those of Kubernetes' OpenAPI (x-kubernetes-patch-merge-key), where tolerations
and envFrom, for example, are replaced.
"""
_PATCH, _RETAIN = "$patch", "$retainKeys"
_ORDER = "$setElementOrder/"


def merged(document: Mapping[str, Any], patch: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a document with a patch applied.

    `$patch: delete` and `$patch: replace` in a map or an element, and `$retainKeys`, mean what they
    mean for Kubernetes. The order of elements is kept; new ones are appended.

    Args:
        document: the document, which is not changed.
        patch: the patch.
        path: path of the document, for errors.

    Raises:
        RequestError: the patch does not fit the document; `where` is the path.
    """
    if patch.get(_PATCH) == "replace":
        return _without_directives(patch, path)
    _check_directive(patch, path)
    found = copy.deepcopy(dict(document))
    retained = patch.get(_RETAIN)
    if retained is not None:
        if not isinstance(retained, list):
            raise _error("this directive is not valid", f"{path}.{_RETAIN}", "a list of fields")
        found = {name: value for name, value in found.items() if name in retained}
    for name, value in patch.items():
        if not isinstance(name, str):
            raise _error("this is not the name of a field", path, "a string", repr(name))
        if name in (_PATCH, _RETAIN) or name.startswith(_ORDER):
            continue  # the order of elements has no meaning in a manifest
        if name.startswith("$"):
            raise _error("this directive is not supported", f"{path}.{name}", "$patch: delete")
        place = f"{path}.{name}" if path else name
        if value is None or (isinstance(value, Mapping) and value.get(_PATCH) == "delete"):
            found.pop(name, None)
        else:
            found[name] = _merged_value(name, found.get(name), value, place)
    return found


def _merged_value(name: str, old: Any, new: Any, path: str) -> Any:
    if isinstance(new, Mapping):
        if old is not None and not isinstance(old, Mapping):
            raise _error("a map cannot be merged into this", path, _kind(old), "a map")
        return merged(old or {}, new, path)
    if isinstance(new, list):
        if old is not None and not isinstance(old, list):
            raise _error("a list cannot be merged into this", path, _kind(old), "a list")
        if name in MERGE_KEYS:
            return _merged_list(MERGE_KEYS[name], old or [], new, path)
        return copy.deepcopy(new)
    if isinstance(old, Mapping | list):
        raise _error("a value cannot replace this", path, _kind(old), repr(new))
    return new


def _merged_list(key: str, old: list[Any], new: list[Any], path: str) -> list[Any]:
    if any(isinstance(element, Mapping) and element == {_PATCH: "replace"} for element in new):
        rest = [element for element in new if element != {_PATCH: "replace"}]
        return [_without_directives(element, path) for element in rest]
    found = copy.deepcopy(old)
    for element in new:
        if not isinstance(element, Mapping) or key not in element:
            raise _error("this element has no name", path, f"maps with {key}", str(element))
        place = f"{path}[{key}={element[key]}]"
        at = next((n for n, each in enumerate(found) if _has_key(each, key, element)), None)
        if element.get(_PATCH) == "delete":
            if at is not None:
                del found[at]
        elif at is None:
            found.append(merged({}, element, place))
        else:
            found[at] = merged(found[at], element, place)
    return found


def _has_key(element: Any, key: str, other: Mapping[str, Any]) -> bool:
    return isinstance(element, Mapping) and element.get(key) == other[key]


def _without_directives(value: Any, path: str) -> dict[str, Any]:
    """Return a map that replaces another one."""
    if not isinstance(value, Mapping):
        raise _error("this element has no name", path, "maps", str(value))
    rest = {name: each for name, each in value.items() if name != _PATCH}
    return merged({}, rest, path)


def _check_directive(patch: Mapping[str, Any], path: str) -> None:
    directive = patch.get(_PATCH, "merge")
    if directive not in ("merge", "delete"):
        expected = "merge, replace or delete"
        raise _error(
            "this directive is not supported", f"{path}.{_PATCH}", expected, repr(directive)
        )


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a map"
    return "a list" if isinstance(value, list) else repr(value)


def _error(problem: str, path: str, expected: str, got: str = "") -> RequestError:
    return RequestError(problem, where=path.lstrip("."), expected=expected, got=got[:200])
