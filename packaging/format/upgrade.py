"""Manifests of older format versions, brought to the present form when they are read.

An upgrade is a function over parsed JSON, from one version to the next. It says of what the older version did not know that it is not
known, and it adds nothing that a reader would have to trust. What it is given may be hostile: it refuses what it cannot take, and all
else is checked when the result is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainload.core.errors import PackageError

Fields = dict[str, Any]
"""manifest.json without its checksum."""

_UNKNOWN: Mapping[str, object] = {"distribution": None, "version": None, "digest": None, "modules": [], "kernels": [], "wheels": []}
"""An operator library of which nothing is known."""


def _from_1(fields: Fields, where: str) -> Fields:
    """Version 1 had of an operator library the distribution's name, or null."""
    libraries = fields.get("op_libraries")
    if not isinstance(libraries, dict) or not all(name is None or isinstance(name, str) for name in libraries.values()):
        raise PackageError("the manifest's field op_libraries is wrong", where=where, expected="names of distributions, or null")
    upgraded_libraries = {namespace: {**_UNKNOWN, "distribution": name} for namespace, name in libraries.items()}
    return {**fields, "format_version": 2, "op_libraries": upgraded_libraries}


def _to_1(fields: Fields) -> Fields | None:
    libraries: Mapping[str, Mapping[str, Any]] = fields["op_libraries"]
    if any({**entry, "distribution": None} != _UNKNOWN for entry in libraries.values()):
        return None
    return {**fields, "format_version": 1, "op_libraries": {name: entry["distribution"] for name, entry in libraries.items()}}


UPGRADES: Mapping[int, Callable[[Fields, str], Fields]] = {1: _from_1}
"""Version -> what makes a manifest of it one of the next version."""
DOWNGRADES: Mapping[int, Callable[[Fields], Fields | None]] = {2: _to_1}
"""Version -> what says the same in the version before it; None where that one cannot say it. The inverse of `UPGRADES`."""


def upgraded(fields: Fields, where: str) -> Fields:
    """The same manifest in the present version. `fields["format_version"]` is one that there was.

    Raises:
        PackageError: a field that an upgrade reads is not what its version had.
    """
    while (upgrade := UPGRADES.get(fields["format_version"])) is not None:
        fields = upgrade(fields, where)
    return fields


def oldest_form(fields: Fields) -> Fields:
    """The same manifest in the oldest version that can say it. Law: it is that of `upgraded(fields)` too."""
    while (downgrade := DOWNGRADES.get(fields["format_version"])) is not None:
        older = downgrade(fields)
        if older is None:
            break
        fields = older
    return fields
