"""Runs without Ray whose records are at a URL, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trainload
from trainload.core.storage.open_files import open_files
from trainload.launching.data.made_data import Data
from trainload.launching.run.journal import losses, read_events
from trainload.launching.run.working_copy import viewed
from trainload.packaging.package import Package

STEPS = 6


def launched(tiny: Package, data: Data, place: str | Path, **options: Any) -> Any:
    plan = trainload.plan(tiny, trainload.Cluster(), "single")
    return trainload.launch(
        tiny,
        plan,
        data,
        run_dir=place,
        compile=False,
        backend="local",
        **{"steps": STEPS, "checkpoint_every": 2, **options},
    )


def losses_at(url: str) -> list[float]:
    with viewed(url) as run:
        return losses(read_events(run.folder))


def arguments(package: Package, data: Path, url: str, *more: str) -> list[str | Path]:
    """Return the command of a run in this process's place, without Ray."""
    first: list[str | Path] = ["launch", package.path, "--data", data, "--run-dir", url]
    return [*first, "--backend", "local", "--no-compile", *more]


def summary_at(url: str) -> dict[str, Any]:
    """Return the summary of the run at a URL; {} if there is none yet."""
    content = open_files(url).read("state.json", 2**20)
    found: dict[str, Any] = {} if content is None else json.loads(content)["summary"]
    return found


def has_begun(url: str) -> bool:
    return bool(summary_at(url).get("step"))
