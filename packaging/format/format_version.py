"""The version and features of the package format, and the check that a reader supports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainload.core.errors import PackageError

FORMAT_VERSION = 2
"""History:

    1 (2026-11-21)  First version.
    2 (2026-11-22)  `op_libraries` describes what registers each namespace: distribution, version,
                    digest, modules, Triton kernels, and wheels in extensions/; feature
                    `extensions`. 2026-11-23: feature `training`. 2026-11-29: feature
                    `initialization`. 2026-11-30: feature `weight-source`.

A reader upgrades older manifests: packaging/format/upgrade.py. tests/golden keeps a package of each
version.
"""
FEATURES: Mapping[str, str] = {
    "abstract": (
        "the package has shapes and no weights, so a launch has to name them: `abstract` says what"
        " was proven"
    ),
    "custom-ops": (
        "graphs call operators of other libraries, described in `op_libraries`; a reader needs"
        " permission to run them"
    ),
    "extensions": (
        "extensions/ holds wheels of operator libraries, which run code; a reader loads them only"
        " with permission"
    ),
    "initialization": (
        "initialization.json has graphs that compute the first values of parameters and buffers"
    ),
    "non-persistent-buffers": (
        "weights/non-persistent.safetensors holds buffers that are not in the model's state dict"
    ),
    "clip-value": "the elements of the gradient are clipped: `clip_value` in the recipe",
    "several-graphs": (
        "several graphs are trained in turns: `loop`, `graphs`, `feeds` and `main` in the recipe,"
        " `clock` in its groups"
    ),
    "ema": "a running mean of the parameters is kept: `ema_decay` in the recipe",
    "loss-scale": "the loss is scaled: `loss_scale` in the recipe",
    "schedules": (
        "learning rates are one number for each group, multiplied by tables that groups share:"
        " `schedules` in the recipe"
    ),
    "training": (
        "the weights were trained from the parent's: `training` says how long, on what, and with"
        " which settings"
    ),
    "variants": (
        "graphs have variants, each with a guard, which are tried in the order of `variants`"
    ),
    "weight-source": (
        "`weight_source` says where weights are found that a launch without others begins with, and"
        " under which names"
    ),
    "whole-updates": (
        "the update of a group takes whole parameters of one shape, which the update states"
    ),
}
"""Features that a package may require of its reader besides the version -> meaning.

Unknown ones are rejected.
"""

BUILT_IN_NAMESPACES = frozenset({"aten", "prims", "trainload"})
"""Namespaces of operators that every reader has."""


def check_version(raw: dict[str, Any], where: str) -> None:
    """Check that a manifest's format version and features are known.

    Raises:
        PackageError: it states none, or one that this version of trainload does not support.
    """
    version = raw.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise PackageError(
            "the manifest states no format version",
            where=where,
            expected=f"1 to {FORMAT_VERSION}",
            got=repr(version),
        )
    if version > FORMAT_VERSION:
        raise PackageError(
            "the package was made in a newer format",
            where=where,
            expected=f"format 1 to {FORMAT_VERSION}",
            got=f"format {version}",
            hint="Update trainload.",
        )
    features = raw.get("features")
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise PackageError(
            "the manifest states no features",
            where=where,
            expected="a list of names",
            got=repr(features)[:80],
        )
    for feature in features:
        if feature not in FEATURES:
            raise PackageError(
                f"the package needs the feature {feature[:80]!r}, which this version of trainload"
                " does not support",
                where=where,
                expected=f"features among {', '.join(sorted(FEATURES))}",
                got=feature[:80],
                hint="Update trainload.",
            )
