"""Attacks on a package: change its files, then recompute every digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainload.core.canonical_json import canonical_json, sha256_bytes

UNKNOWN_LIBRARY: dict[str, Any] = {
    "distribution": None,
    "version": None,
    "digest": None,
    "modules": [],
    "kernels": [],
    "wheels": [],
}
"""An entry of `op_libraries` without information."""


def reseal(package: Path) -> None:
    """Recompute the manifest's entries of files and its checksum."""
    manifest = json.loads((package / "manifest.json").read_bytes())
    for path, entry in manifest["files"].items():
        data = (package / path).read_bytes()
        entry["size"], entry["sha256"] = len(data), sha256_bytes(data)
    write_manifest(package, manifest)


def write_manifest(package: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("checksum", None)
    (package / "manifest.json").write_bytes(
        canonical_json({**manifest, "checksum": sha256_bytes(canonical_json(manifest))})
    )


def edit_manifest(package: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((package / "manifest.json").read_bytes())
    change(manifest)
    write_manifest(package, manifest)


def edit_graph(
    package: Path, change: Callable[[dict[str, Any]], object], file: str = "graphs/train.json"
) -> None:
    document = json.loads((package / file).read_bytes())
    change(document)
    (package / file).write_bytes(canonical_json(document))
    reseal(package)


def flip(path: Path, at: int) -> None:
    """Change one bit of byte `at`, which counts from the end if it is negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def rechunk(package: Path) -> None:
    """Recompute the list of chunks from the files of weights."""
    path = package / "weights/chunks.json"
    chunks = json.loads(path.read_bytes())
    size = chunks["chunk_size"]
    for file in chunks["files"]:
        data = (package / file).read_bytes()
        chunks["files"][file] = [
            sha256_bytes(data[at : at + size]) for at in range(0, len(data), size)
        ]
    path.write_bytes(canonical_json(chunks))
