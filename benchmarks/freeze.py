"""Compare the time to freeze a Llama with that of its unavoidable parts, for several depths.

    python benchmarks/freeze.py

The parts are torch.export of each graph in the package, one joint trace of the training graph, and
one eager run per replay. The whole and the parts are measured alternately, each in a new process,
on one thread. Then freezes of other depths are measured, and operations on a package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import MIB, RESULTS, ROOT, machine, median, note, save, screen, table

HERE = Path(__file__).resolve().parent
RUN_SECONDS = 1800.0
BAR = 1.5
"""Maximum ratio of the whole to the sum of its parts."""
GROWTH_BAR = 1.25
"""Maximum ratio of the time per additional layer of the deepest models to the shallowest ones.

Between the two deepest, and between the two shallowest.
"""


class MeasurementError(Exception):
    """A process failed; the message is the end of its output."""


def measured(what: str, scratch: Path, *options: object) -> dict[str, Any]:
    """Run freeze_parts.py once and return its result."""
    out = scratch / "out.json"
    command = [
        sys.executable,
        str(HERE / "freeze_parts.py"),
        what,
        "--out",
        str(out),
        *map(str, options),
    ]
    # The key that seals derived graphs belongs to a user; the benchmark makes its own.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRAINLOAD_STATE_DIR": str(scratch / "state"),
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise MeasurementError(
            f"{what} ended with status {done.returncode}:\n{done.stdout[-2000:]}"
        )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return name -> median CPU seconds over the runs."""
    return {name: median(run["cpu"][name] for run in runs) for name in runs[0]["cpu"]}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument(
        "--hidden",
        type=int,
        default=512,
        help="hidden size; heads have 64 dims, the MLP 2.75 times the hidden size",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of whole and parts")
    parser.add_argument(
        "--depths",
        default="6,12,24,48",
        help="comma-separated numbers of layers, each frozen once; empty to skip",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "freeze.json")
    arguments = parser.parse_args()
    began, before = time.perf_counter(), machine()
    size = ["--layers", arguments.layers, "--hidden", arguments.hidden]
    depths = [int(depth) for depth in arguments.depths.split(",") if depth]
    wholes: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    packages: list[dict[str, Any]] = []
    growth: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="trainload-freeze-") as name:
        scratch = Path(name)
        try:
            for number in range(arguments.rounds):
                parts.append(measured("parts", scratch, *size))
                kept = scratch / f"{number}.tl"
                wholes.append(measured("whole", scratch, *size, "--package", kept))
                packages.append(measured("package", scratch, "--package", kept))
                ratio = sum(wholes[-1]["cpu"].values()) / sum(parts[-1]["cpu"].values())
                note(f"round {number + 1}: whole / parts = {ratio:.2f}")
            for depth in depths:
                growth[depth] = measured(
                    "whole", scratch, "--layers", depth, "--hidden", arguments.hidden
                )
                note(f"{depth} layers: {sum(growth[depth]['cpu'].values()):.1f} s")
        except MeasurementError as error:
            note(str(error))
            return 1
    listed, stages, later = medians(parts), medians(wholes), medians(packages)
    whole, total = sum(stages.values()), sum(listed.values())
    ratios = [
        sum(w["cpu"].values()) / sum(p["cpu"].values()) for w, p in zip(wholes, parts, strict=True)
    ]
    ratio = median(ratios)
    slopes = steepness({depth: sum(run["cpu"].values()) for depth, run in growth.items()})
    memory = {
        kind: median(run["memory"]["peak"] for run in runs)
        for kind, runs in (("whole", wholes), ("parts", parts))
    }
    rows = [(name, f"{seconds:.2f}", f"{seconds / total:.0%}") for name, seconds in listed.items()]
    rows += [
        ("sum of the parts", f"{total:.2f}", "100%"),
        ("freeze", f"{whole:.2f}", f"{ratio:.2f}x"),
    ]
    title = (
        f"{arguments.layers} layers of width {arguments.hidden}: processor seconds on one thread,"
        f" medians of {arguments.rounds}"
    )
    screen().print(
        table(
            title, ["unavoidable part", "s", "share"], rows, marked=["sum of the parts", "freeze"]
        )
    )
    screen().print(
        table(
            "where the freeze spends it",
            ["stage", "s"],
            [(n, f"{s:.2f}") for n, s in stages.items()],
        )
    )
    screen().print(
        table(
            "what is done with the package",
            ["step", "s"],
            [(n, f"{s:.2f}") for n, s in later.items()],
        )
    )
    peaks = [(kind, f"{bytes_ / MIB:,.0f}") for kind, bytes_ in memory.items()]
    screen().print(table("peak resident memory", ["", "MiB"], peaks))
    if growth:
        lines = [
            (str(depth), f"{sum(run['cpu'].values()):.1f}", f"{slopes.get(depth, 0):.2f}")
            for depth, run in growth.items()
        ]
        screen().print(
            table("depth", ["layers", "s", "s for each layer since the line above"], lines)
        )
    result: dict[str, Any] = {
        "machine": before,
        "settings": {
            "layers": arguments.layers,
            "hidden": arguments.hidden,
            "rounds": arguments.rounds,
            "threads": 1,
        },
        "parameters": parts[0]["parameters"],
        "parts": listed,
        "stages": stages,
        "later": later,
        "ratio": ratio,
        "ratios": ratios,
        "peak_bytes": memory,
        "depths": {str(depth): run for depth, run in growth.items()},
        "seconds_per_layer": {str(depth): slope for depth, slope in slopes.items()},
        "runs": {"whole": wholes, "parts": parts, "package": packages},
    }
    save(result | {"seconds": time.perf_counter() - began}, arguments.out)
    note(f"written: {arguments.out}")
    steep = len(slopes) > 1 and list(slopes.values())[-1] > GROWTH_BAR * next(iter(slopes.values()))
    if ratio > BAR:
        note(f"the freeze takes {ratio:.2f} times its parts, more than {BAR}")
    if steep:
        note(
            "the last layers take longer than the first ones: something grows faster than the graph"
        )
    return 1 if ratio > BAR or steep else 0


def steepness(seconds: dict[int, float]) -> dict[int, float]:
    """Return depth -> seconds per additional layer compared with the previous depth."""
    pairs = list(seconds.items())
    return {
        more: (late - early) / (more - fewer)
        for (fewer, early), (more, late) in itertools.pairwise(pairs)
    }


if __name__ == "__main__":
    sys.exit(main())
