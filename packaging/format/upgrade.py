"""Upgrades of manifests of older format versions when they are read.

An upgrade is a function over parsed JSON, from one version to the next. It marks as unknown what
the older version did not record, and adds nothing that a reader would have to trust. Its input may
be hostile: it rejects what it cannot convert, and everything else is checked with the upgraded
manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainload.core.errors import PackageError

Fields = dict[str, Any]
"""manifest.json without its checksum."""

_UNKNOWN: Mapping[str, object] = {
    "distribution": None,
    "version": None,
    "digest": None,
    "modules": [],
    "kernels": [],
    "wheels": [],
}
"""Entry of an operator library about which nothing is known."""


def _from_1(fields: Fields, where: str) -> Fields:
    """Upgrade version 1, which recorded only the distribution (or null) of an operator library."""
    libraries = fields.get("op_libraries")
    if not isinstance(libraries, dict) or not all(
        name is None or isinstance(name, str) for name in libraries.values()
    ):
        raise PackageError(
            "the manifest's field op_libraries is wrong",
            where=where,
            expected="names of distributions, or null",
        )
    upgraded_libraries = {
        namespace: {**_UNKNOWN, "distribution": name} for namespace, name in libraries.items()
    }
    return {**fields, "format_version": 2, "op_libraries": upgraded_libraries}


def _to_1(fields: Fields) -> Fields | None:
    libraries: Mapping[str, Mapping[str, Any]] = fields["op_libraries"]
    if any({**entry, "distribution": None} != _UNKNOWN for entry in libraries.values()):
        return None
    return {
        **fields,
        "format_version": 1,
        "op_libraries": {name: entry["distribution"] for name, entry in libraries.items()},
    }


UPGRADES: Mapping[int, Callable[[Fields, str], Fields]] = {1: _from_1}
"""Version -> function that converts its manifest to the next version."""
DOWNGRADES: Mapping[int, Callable[[Fields], Fields | None]] = {2: _to_1}
"""Version -> function that converts its manifest to the previous version, or returns None if that
cannot express it.

The inverse of `UPGRADES`.
"""


def upgraded(fields: Fields, where: str) -> Fields:
    """Return the manifest in the present version. `fields["format_version"]` is a known version.

    Raises:
        PackageError: a field that an upgrade reads is not valid in its version.
    """
    while (upgrade := UPGRADES.get(fields["format_version"])) is not None:
        fields = upgrade(fields, where)
    return fields


def oldest_form(fields: Fields) -> Fields:
    """Return the manifest in the oldest version that can express it.

    Law: `oldest_form(upgraded(fields))` is the same.
    """
    while (downgrade := DOWNGRADES.get(fields["format_version"])) is not None:
        older = downgrade(fields)
        if older is None:
            break
        fields = older
    return fields
