"""Create the golden packages of the current format version: python -m tests.golden.make [NAME...].

Run it once for each version, before it changes. Existing goldens are never created again by a later
version: they are what their version wrote.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tests.golden.goldens import HERE, Golden, initial_digests, train
from tests.golden.jobs import CASES, Case

import trainload
from trainload.packaging.format.format_version import FORMAT_VERSION
from trainload.packaging.package import Package

APART = 0.01
"""Minimum relative difference between two losses of a golden, to notice a skipped update."""


def make(name: str, case: Case, folder: Path) -> None:
    """Write the golden of a case to a new folder."""
    folder.mkdir(parents=True)
    job, reduced = (
        each if each is None or case.recorded else each() for each in (case.make, case.reduced)
    )
    assert job is not None
    package = trainload.freeze(
        job,
        folder / "package.tl",
        abstract=reduced is not None,
        reduced=reduced,
        **case.freeze,
    )
    # They contain paths of this machine, and are not part of the package's identity.
    for outside in ("debug", "derived"):
        shutil.rmtree(package.path / outside)
    if case.recorded:
        (folder / "initial.json").write_text(json.dumps(initial_digests(package), indent=1) + "\n")
    if not case.parts:
        return
    files = (
        ["data.npz"]
        if len(case.parts) == 1
        else [f"part-{number}.npz" for number in range(len(case.parts))]
    )
    for file, part in zip(files, case.parts, strict=True):
        columns = {name: column.numpy() for name, column in part().items()}
        np.savez_compressed(folder / file, **columns)  # type: ignore[arg-type]  # its stub takes arrays for flags
    if len(files) > 1:
        (folder / "mixture.json").write_text(
            json.dumps({"parts": [{"data": file} for file in files]}) + "\n"
        )
    data = folder / ("mixture.json" if len(files) > 1 else "data.npz")
    if case.trained is not None:
        package = retrained(package, data, case.trained)
    with tempfile.TemporaryDirectory() as run_dir:
        found = train(package, data, Path(run_dir) / "run", **Golden(folder).opening)
    for kind, values in found.items():
        assert all(abs(a - b) > APART * abs(a) for a, b in itertools.pairwise(values)), (
            name,
            kind,
            values,
        )
    (folder / "losses.json").write_text(
        json.dumps({"torch": torch.__version__.partition("+")[0], **found}, indent=1) + "\n"
    )


def retrained(package: Package, data: Path, overrides: trainload.Overrides) -> Package:
    """Train a frozen package for two steps, and replace it with the result."""
    plan = trainload.plan(overrides.apply(package), trainload.Cluster(), "single")
    with tempfile.TemporaryDirectory(dir=package.path.parent) as run_dir:
        made = Path(run_dir) / "trained.tl"
        trainload.launch(
            package,
            plan,
            data,
            run_dir=Path(run_dir) / "run",
            output=made,
            overrides=overrides,
            backend="local",
            compile=False,
        )
        shutil.rmtree(package.path)
        made.rename(package.path)
    return trainload.open(package.path)


def main(names: Sequence[str]) -> None:
    """Create the named goldens, or all that do not exist."""
    for name in names or CASES:
        folder = HERE / f"v{FORMAT_VERSION}" / name
        if folder.exists():
            print(f"{folder}: it is there already, and stays as it was made")
            continue
        try:
            make(name, CASES[name], folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder}: {size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
