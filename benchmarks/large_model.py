"""Train a model that is larger than the limit of memory under which it is frozen.

    python benchmarks/large_model.py [--steps 3] [--sources init safetensors dcp]

A Llama of 565 million parameters in float32 (state of 8.4 GiB with AdamW) is frozen without weights
by a process whose private memory is limited to 2 GiB (RLIMIT_DATA), and trained by two workers
under ZeRO-3 with one row of 64 tokens each: from the first values of its code (`--weights init`),
from safetensors files, and from a checkpoint of torch.distributed.checkpoint with the same values.
Each run is resumed for one more step. A worker's peak resident memory is compared with the plan's
estimate plus the peak of a worker that trains the reduced model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from large_model_job import LARGE
from llama8b import REDUCED, Shapes
from measure import RESULTS, ROOT, command, machine, note, save, screen, table

LIMIT = 2 * 2**30
"""Bytes of private memory of the process that freezes."""
JOB = Path(__file__).resolve().parent / "large_model_job.py"
SOURCES = ("init", "safetensors", "dcp")
RESUME = """
import sys, trainload
trainload.resume(sys.argv[1], steps=int(sys.argv[2]))
"""
SAVE_DCP = """
import sys, trainload
from torch.distributed.checkpoint.state_dict_saver import save
package = trainload.open(sys.argv[1])
save({name: package.weights.tensor(name) for name in package.weights.names()},
     checkpoint_id=sys.argv[2])
"""


@contextmanager
def rank_peaks() -> Iterator[dict[str, int]]:
    """Yield rank -> its peak resident memory in bytes, of the processes of ranks in the block."""
    peaks: dict[str, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    status = (process / "status").read_text()
                except OSError:  # it has ended
                    continue
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                name = fields["Name"].strip()
                if name.startswith("rank") and "VmHWM" in fields:
                    peak = int(fields["VmHWM"].split()[0]) * 1024
                    peaks[name] = max(peaks.get(name, 0), peak)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def rows(path: Path, shapes: Shapes) -> Path:
    """Write rows of tokens."""
    draw = np.random.default_rng(0)
    size = (64, shapes.length)
    names = ("tokens", "targets")
    np.savez(path, **{name: draw.integers(0, shapes.vocabulary, size) for name in names})
    return path


def train(
    scratch: Path, package: Path, data: Path, name: str, steps: int, weights: Path | str
) -> dict[str, Any]:
    """Train and resume one run, and return its measurements."""
    plan = scratch / f"{name}.json"
    options = ("--nodes", 1, "--devices-per-node", 2, "--strategy", "zero3")
    estimate = command("plan", package, *options, "-o", plan).result["estimate"]
    run = scratch / name
    launch = ("launch", package, "--plan", plan, "--data", data, "--weights", weights)
    with rank_peaks() as peaks:
        first = command(*launch, "--steps", steps, "--run-dir", run)
    with rank_peaks() as resumed:
        words = [sys.executable, "-c", RESUME, str(run), str(steps + 1)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    losses = [event["data"]["loss"] for event in events if event["kind"] == "step"]
    expected = sum(value for key, value in estimate.items() if not key.startswith("communication"))
    return {
        "estimate": expected,
        "peaks": sorted(peaks.values())[-2:],  # without the server from which they are forked
        "resumed_peaks": sorted(resumed.values())[-2:],
        "seconds": first.seconds,
        "losses": losses,
    }


def sources(scratch: Path, package: Path, wanted: list[str]) -> dict[str, Path | str]:
    """Return the weights of each run, written from the first values."""
    filled = scratch / "filled.tl"
    if wanted != ["init"]:
        note("writing the first values")
        command("fill", package, "--weights", "init", "-o", filled)
    places: dict[str, Path | str] = {"init": "init", "safetensors": filled / "weights"}
    if "dcp" in wanted:
        places["dcp"] = scratch / "dcp"
        words = [sys.executable, "-W", "ignore", "-c", SAVE_DCP, str(filled), str(places["dcp"])]
        subprocess.run(words, check=True)
    return {name: places[name] for name in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=RESULTS / "large_model.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as name:
        scratch = Path(name)
        note("freezing")
        package, small = scratch / "large.tl", scratch / "small.tl"
        reduced = f"{JOB}:reduced"
        frozen = command(
            "freeze", f"{JOB}:large", "--abstract", "--reduced", reduced, "-o", package, limit=LIMIT
        )
        command("freeze", reduced, "-o", small)
        note("training the reduced model")
        own = train(scratch, small, rows(scratch / "small.npz", REDUCED), "own", 3, "init")
        data = rows(scratch / "rows.npz", LARGE)
        runs = {}
        for source, weights in sources(scratch, package, arguments.sources).items():
            note(f"training from {source}")
            runs[source] = train(scratch, package, data, source, arguments.steps, weights)
    result = {
        "machine": machine(),
        "frozen": {"seconds": frozen.seconds, "peak": frozen.peak},
        "own": max(own["peaks"]),
        "runs": runs,
    }
    save(result, arguments.out)
    gib = 2**30
    lines = [
        [
            source,
            f"{run['estimate'] / gib:.2f}",
            f"{(run['estimate'] + result['own']) / gib:.2f}",
            " ".join(f"{peak / gib:.2f}" for peak in run["peaks"]),
            " ".join(f"{peak / gib:.2f}" for peak in run["resumed_peaks"]),
            f"{run['seconds']:.0f}",
            " ".join(f"{loss:.6f}" for loss in run["losses"]),
        ]
        for source, run in runs.items()
    ]
    columns = ["source", "estimate", "with own", "peaks", "resumed", "seconds", "losses"]
    screen().print(table("GiB per worker", columns, lines))
    note(f"frozen in {frozen.seconds:.0f} s, peak {frozen.peak / gib:.2f} GiB")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
