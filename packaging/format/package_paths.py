"""Paths of a package's files, and the check of paths that a manifest lists."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
CONSTANTS = "constants.safetensors"
INITIALIZATION = "initialization.json"
INITIAL_CONSTANTS = "initialization.safetensors"
INDEX = "weights/model.safetensors.index.json"
NON_PERSISTENT = "weights/non-persistent.safetensors"
CHUNKS = "weights/chunks.json"
SIGNATURES = "signatures"
OUTSIDE = ("debug", "derived", SIGNATURES)
"""Folders whose files are not part of the package's identity."""
EXTENSIONS = "extensions"
"""The folder of wheels."""

SAFE_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
"""Pattern of one part of a path, between slashes."""
_PATH = re.compile(rf"{SAFE_PART}(/{SAFE_PART})*")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def safe_path(path: str) -> str:
    """Return `path` if a package may contain it.

    Raises:
        ValueError: it is not a safe relative path.
    """
    parts = path.split("/")
    if (
        len(path) > 512
        or not _PATH.fullmatch(path)
        or any(part.endswith(".") or _RESERVED.fullmatch(part) for part in parts)
    ):
        raise ValueError(
            f"{path[:80]!r} is not a safe relative path (letters, digits and _ . + - between"
            " slashes)"
        )
    return path
