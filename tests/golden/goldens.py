"""Golden packages: their location, and the run that each is tested with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainload
from trainload.core.canonical_json import sha256_bytes
from trainload.launching.run.journal import losses, read_events
from trainload.packaging.package import Package
from trainload.packaging.tensors.safetensors_file import bytes_of

HERE = Path(__file__).parent
LIBRARIES = {"golden_ops": str(HERE / "golden_library.py")}
"""Libraries for the golden with another library's operators, unless it contains a wheel."""
FP32 = 2e-5
"""Tolerance of losses in float32.

Another torch or processor adds in another order, which changes some units in the last of float32's
24 bits, and more after an update.
"""
BF16 = 3e-3
"""Tolerance of losses with a bfloat16 region.

There such a difference may round a value to its neighbour, 2**-8 away; a loss depends on several
values.
"""
TOLERANCES = {"plain": BF16}
"""Golden -> relative tolerance of its losses, if it is not FP32."""


@dataclass(frozen=True)
class Golden:
    """A golden: a folder with package.tl, its data and losses.json.

    An abstract package has no losses.json. One whose construction was recorded has initial.json:
    the digests of its first values.
    """

    folder: Path

    @property
    def version(self) -> int:
        """Version of the format."""
        return int(self.folder.parent.name.removeprefix("v"))

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def package(self) -> Path:
        return self.folder / "package.tl"

    @property
    def data(self) -> Path:
        """Path of the data: a mixture if there are several npz files."""
        mixture = self.folder / "mixture.json"
        return mixture if mixture.exists() else self.folder / "data.npz"

    @property
    def opening(self) -> dict[str, Any]:
        """Options that `trainload.open` and `trainload.launch` need for its operators."""
        if (self.package / "extensions").exists():
            return {"trust_extensions": True}
        return {"libraries": LIBRARIES} if self.name == "operators" else {}

    def __str__(self) -> str:
        return f"v{self.version}-{self.name}"


def initial_digests(package: Package) -> dict[str, str]:
    """Return tensor -> sha256 of its first value, with the seed 5."""
    with tempfile.TemporaryDirectory() as folder:
        filled = trainload.fill(package, "init", Path(folder) / "filled.tl", seed=5)
        return {
            name: sha256_bytes(bytes(bytes_of(filled.weights.tensor(name).contiguous())))
            for name in filled.weights.names()
        }


def goldens() -> Iterator[Golden]:
    """Return all goldens, oldest version first."""
    folders = [
        folder for version in HERE.glob("v*") for folder in version.iterdir() if folder.is_dir()
    ]
    return (
        Golden(folder)
        for folder in sorted(folders, key=lambda each: (Golden(each).version, each.name))
    )


def train(package: Package, data: Path, run_dir: Path, **options: Any) -> dict[str, list[float]]:
    """Train a package for two steps in this process, uncompiled.

    Return its losses, and those of the evaluations before and after the steps.
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
