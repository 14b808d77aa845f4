"""Freeze, plan and simulate the shapes of models that no machine here could hold.

    python benchmarks/large_shapes.py [--models 8b 70b 405b]

Llama 3.1 from transformers in float32 with 4 x 128 tokens, without weights, verified with a reduced
model of three layers; planned and simulated for 512 ranks under ZeRO-3. Each command is a process
that may use one core only.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from measure import RESULTS, ROOT, Measured, command, machine, note, save, screen, table

JOB = Path(__file__).resolve().parent / "large_shapes_job.py"
MODELS = ("8b", "70b", "405b")
CLUSTER = ("--nodes", 64, "--devices-per-node", 8, "--strategy", "zero3")
STAGES = ("freeze", "plan", "simulate")


def measure(scratch: Path, model: str) -> dict[str, Measured]:
    """Return the name of each stage and its measurement."""
    package, plan = scratch / f"{model}.tl", scratch / f"{model}.json"
    job, reduced = f"{JOB}:llama_{model}", f"{JOB}:reduced"
    arguments: dict[str, tuple[object, ...]] = {
        "freeze": ("freeze", job, "--abstract", "--reduced", reduced, "-o", package),
        "plan": ("plan", package, *CLUSTER, "-o", plan),
        "simulate": ("simulate", package, "--plan", plan),
    }
    measured = {}
    for stage in STAGES:
        note(f"{stage} {model}")
        measured[stage] = command(*arguments[stage], core=min(os.sched_getaffinity(0)))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS / "large_shapes.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = {model: measure(Path(scratch), model) for model in arguments.models}
    numbers = {
        model: {
            stage: {"seconds": each.seconds, "cpu": each.cpu, "peak": each.peak}
            for stage, each in stages.items()
        }
        for model, stages in found.items()
    }
    save({"machine": machine(), "models": numbers}, arguments.out)
    lines = [
        [
            stage,
            *(
                f"{each[stage].cpu:.0f} / {each[stage].seconds:.0f}, {each[stage].peak / 2**30:.2f}"
                for each in found.values()
            ),
        ]
        for stage in STAGES
    ]
    title = "CPU seconds / seconds, peak in GiB"
    screen().print(table(title, ["stage", *found], lines))


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
