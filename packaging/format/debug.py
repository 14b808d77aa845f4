"""debug/: stack traces and the source map.

Not part of the package's identity; debug/index.json has the digests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import IntegrityError, PackageError
from trainload.core.logs import log_handled
from trainload.core.paths import open_inside, write_bytes
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_files import read_checked, walk

_log = logging.getLogger(__name__)

INDEX = "debug/index.json"
_MAX = 64 * 2**20


def write_debug(root: Path, documents: Mapping[str, object]) -> None:
    """Write debug/NAME.json for each document, and the index.

    Raises:
        PackageError: a document is not JSON.
        OSError: the disk is full.
    """
    entries: dict[str, object] = {}
    for name, document in sorted(documents.items()):
        data = canonical_json(document)
        write_bytes(root / f"debug/{name}.json", data)
        entries[f"debug/{name}.json"] = FileEntry(
            media_type="application/json", sha256=sha256_bytes(data), size=len(data)
        ).model_dump()
    body = {"files": entries}
    write_bytes(
        root / INDEX, canonical_json({**body, "checksum": sha256_bytes(canonical_json(body))})
    )


def read_debug(root: Path, name: str) -> Any:
    """Return the JSON value of debug/NAME.json, or None if it is absent or damaged."""
    path = f"debug/{name}.json"
    try:
        index = _read_index(root)
        if path not in index:
            return None
        return parse_canonical(
            read_checked(root, path, FileEntry.model_validate(index[path])), path
        )
    except (PackageError, ValidationError) as error:
        log_handled(_log, f"{root / path} is damaged; graphs have no source lines", error)
        return None


def _read_index(root: Path) -> dict[str, Any]:
    with open_inside(root, INDEX) as file:
        index = parse_canonical(file.read(_MAX + 1), INDEX, max_bytes=_MAX, max_depth=8)
    if (
        not isinstance(index, dict)
        or set(index) != {"files", "checksum"}
        or not isinstance(index["files"], dict)
    ):
        raise IntegrityError("the index is malformed", where=INDEX)
    if index["checksum"] != sha256_bytes(canonical_json({"files": index["files"]})):
        raise IntegrityError("the index is damaged: its checksum does not match", where=INDEX)
    return index["files"]


def debug_problems(root: Path) -> list[tuple[str, str]]:
    """Return (file, problem) for every damaged, missing or unlisted file of debug/."""
    present = (
        {f"debug/{path}" for path, _ in walk(root / "debug")}
        if (root / "debug").is_dir()
        else set()
    )
    if not present:
        return []
    try:
        index = _read_index(root)
    except PackageError as error:
        return [(INDEX, str(error))]
    problems: list[tuple[str, str]] = [
        (path, "not in debug/index.json") for path in sorted(present - set(index) - {INDEX})
    ]
    for path, entry in index.items():
        try:
            if path not in present:
                raise IntegrityError("a file is missing", where=path)
            read_checked(root, path, FileEntry.model_validate(entry))
        except PackageError as error:
            problems.append((path, str(error)))
    return problems
