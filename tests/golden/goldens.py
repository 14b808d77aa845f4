"""Golden packages: where they are, and the run that each is put through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainload
from trainload.launching.run.journal import losses, read_events
from trainload.packaging.package import Package

HERE = Path(__file__).parent
LIBRARIES = {"golden_ops": str(HERE / "golden_library.py")}
"""What the golden with another library's operators needs where it brings no wheel."""
FP32 = 2e-5
"""Another torch, or another processor, adds in another order: some units in the last of float32's
24 bits, more of them after an update.
"""
BF16 = 3e-3
"""In a bfloat16 region such a difference may round a value to its neighbour, 2**-8 away; it is one
of several that make a loss.
"""
TOLERANCES = {"plain": BF16}
"""Golden -> how far its losses may be apart, relative, where it is not FP32."""


@dataclass(frozen=True)
class Golden:
    """A golden: `folder` holds package.tl, its data, and losses.json, which is not there for an
    abstract package.
    """

    folder: Path

    @property
    def version(self) -> int:
        """Of the format."""
        return int(self.folder.parent.name.removeprefix("v"))

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def package(self) -> Path:
        return self.folder / "package.tl"

    @property
    def data(self) -> Path:
        """A mixture of the npz files where there are several."""
        mixture = self.folder / "mixture.json"
        return mixture if mixture.exists() else self.folder / "data.npz"

    @property
    def opening(self) -> dict[str, Any]:
        """What `trainload.open` and `trainload.launch` must be told of its operators."""
        if (self.package / "extensions").exists():
            return {"trust_extensions": True}
        return {"libraries": LIBRARIES} if self.name == "operators" else {}

    def __str__(self) -> str:
        return f"v{self.version}-{self.name}"


def goldens() -> Iterator[Golden]:
    """All of them, the oldest version first."""
    folders = [
        folder for version in HERE.glob("v*") for folder in version.iterdir() if folder.is_dir()
    ]
    return (
        Golden(folder)
        for folder in sorted(folders, key=lambda each: (Golden(each).version, each.name))
    )


def train(package: Package, data: Path, run_dir: Path, **options: Any) -> dict[str, list[float]]:
    """Trains a package for two steps in this process, uncompiled.

    Returns its losses, and those of the evaluation before and after them.
    """
    plan = trainload.plan(package, trainload.Cluster(), "single")
    run = trainload.launch(
        package,
        plan,
        data,
        run_dir=run_dir,
        steps=2,
        eval_data=data,
        backend="local",
        compile=False,
        **options,
    )
    return {
        "train": losses(read_events(run_dir)),
        "eval": [float(each["loss"]) for each in run.evaluations],
    }
