"""Golden artifacts: plans, runs, a store, a retraining and a cache written by an earlier version.

Paths of their original folder are stored as FOLDER. `restore` replaces these with the paths of a
test's folder, and recomputes the checksums of the store's records that contain a path. All other
bytes are what that version wrote.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.house.source import ROOT

HERE = Path(__file__).parent / "artifacts"
FOLDER = "@FOLDER@"
_TEXT = {".json", ".jsonl", ".yaml", ".txt"}

LINE = "nightly"
STEPS, STOPPED = 6, 3
"""Updates of each run, and the number of updates after which the stopped run was stopped."""
PLANS = {
    "single": [],
    "zero3": ["--devices-per-node", "2", "--strategy", "zero3"],
    "tensor": ["--devices-per-node", "2", "--tensor", "2"],
    "pipeline": ["--devices-per-node", "2", "--pipeline", "2", "--accumulate", "2"],
}
"""Plan -> options of `trainload plan`."""
QUERIES = {
    "inspect": ["inspect", "package.tl"],
    "verify": ["verify", "package.tl"],
    "plan": ["plan", "package.tl"],
    "simulate": ["simulate", "package.tl", "--plan", "plans/zero3.json"],
    "diff": ["diff", "package.tl", "trained.tl"],
    "ops": ["ops", "package.tl"],
    "evaluate": [
        "evaluate",
        "trained.tl",
        "--data",
        "data.npz",
        "--backend",
        "local",
        "--no-compile",
    ],
    "runs": ["runs", "runs"],
    "status": ["status", "runs/ended"],
    "logs": ["logs", "runs/ended"],
    "report": ["report", "runs/ended"],
    "releases": ["releases", "retraining/store"],
    "history": ["history", "retraining/store"],
    "lineage": ["lineage", f"retraining/store#{LINE}"],
    "check": ["retrain", "check", "retraining/retrain.yaml"],
    "refused": ["plan", "package.tl", "--devices-per-node", "2", "--global-batch", "7"],
}
"""Name -> a command whose `--json` output is a golden. Paths are relative to the folder."""


def versions() -> list[Path]:
    """Return the folders of artifacts, oldest first."""
    return sorted(
        (path for path in HERE.iterdir() if path.is_dir()), key=lambda path: int(path.name)
    )


def store(source: Path, target: Path) -> None:
    """Copy artifacts that were created in `source`.

    Paths of `source` become FOLDER, and those of this repository relative paths.
    """
    shutil.copytree(source, target)
    for path in _texts(target):
        path.write_text(path.read_text().replace(str(source), FOLDER).replace(f"{ROOT}/src/", ""))


def restore(version: Path, folder: Path) -> Path:
    """Copy the artifacts of a version to a new folder, and return it."""
    shutil.copytree(version, folder)
    for path in _texts(folder):
        text = path.read_text()
        if FOLDER in text:
            text = text.replace(FOLDER, str(folder))
            path.write_text(
                _sealed(text) if (folder / "retraining" / "store") in path.parents else text
            )
    return folder


def keys_of(value: Any, at: str = "") -> Iterator[str]:
    """Yield the path of each key of a JSON value. All entries of a list count as one."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"{at}.{key}"
            yield from keys_of(entry, f"{at}.{key}")
    elif isinstance(value, list):
        for entry in value:
            yield from keys_of(entry, f"{at}[]")


def _texts(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in _TEXT)


def _sealed(text: str) -> str:
    """Return a record of a store with its checksum recomputed.

    The checksum is the sha256 of the canonical JSON of the record's fields.
    """
    fields = json.loads(text)
    del fields["checksum"]
    return _canonical(
        {**fields, "checksum": hashlib.sha256(_canonical(fields).encode()).hexdigest()}
    )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
