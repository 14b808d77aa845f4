"""Freeze the GAN, train it on two workers, and compare its images with real ones before and after.

`make demo-gan` runs it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import trainload

EXAMPLE = Path(__file__).resolve().parent
ROOT = EXAMPLE.parents[1]


def command(*arguments: str | Path) -> dict[str, Any]:
    """Return the JSON output of a `trainload` command; its progress goes to this terminal."""
    line = [sys.executable, "-m", "trainload", *map(str, arguments), "--json"]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"trainload {arguments[0]} ended with status {done.returncode}: {done.stdout.strip()}"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def images(package: Path, rows: int) -> torch.Tensor:
    """Generate images with a package's predict graph: float32 (rows, 64)."""
    graph = trainload.open(package).graph("predict").module(check_guards=False)
    torch.manual_seed(0)
    with torch.no_grad():
        (found,) = graph({"image": torch.zeros(rows, 64)})
    assert isinstance(found, torch.Tensor)
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the energy distance of two sets of points, (n, d) and (m, d).

    It is 2 E|x - y| - E|x - x'| - E|y - y'|, which is 0 for equal distributions.
    """
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


def main() -> int:
    """Run the demo. Returns the exit status: 1 if the images have not become more realistic."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "demo-gan",
        help="output folder; replaced if it exists",
    )
    parser.add_argument("--steps", type=int, help="a shorter run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args()
    folder = given.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pixels = torch.from_numpy(load_digits().images).float().flatten(1) / 16
    real, held_out = pixels[:1400], pixels[1400:]
    np.savez(folder / "digits.npz", image=real.numpy())
    command("freeze", f"{EXAMPLE / 'job.py'}:job", "-o", folder / "gan.tl")
    options: list[str | Path] = ["--no-compile"] if given.no_compile else []
    options += ["--steps", str(given.steps)] if given.steps is not None else []
    options += ["--workers", str(given.workers)] + (
        ["--strategy", "zero3"] if given.workers > 1 else []
    )
    paths = ["--run-dir", folder / "run", "--output", folder / "trained.tl"]
    run = command("launch", folder / "gan.tl", "--data", folder / "digits.npz", *paths, *options)
    before, after = (
        distance(images(folder / name, len(held_out)), held_out)
        for name in ("gan.tl", "trained.tl")
    )
    found = {
        "energy distance to held-out digits": {
            "before": before,
            "after": after,
            "real": distance(real[: len(held_out)], held_out),
        },
        "seconds": run["seconds"],
    }
    (folder / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    return int(after >= before)


if __name__ == "__main__":
    sys.exit(main())
