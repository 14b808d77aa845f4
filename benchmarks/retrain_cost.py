"""Measure the time to the first step and the bytes sent of the first and fiftieth retraining.

    python benchmarks/retrain_cost.py [--ticks 50] [--width 512] [--layers 4]

Each tick is a `trainload retrain tick` process with compiled graphs that trains on the new file of
a day. The time to the first step is measured from the start of the process, imports included, to
the end of the first step. The bytes are those written to the store. Two lines: one trains all
weights, the other only its last layer, so only files with that layer can be new.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measure import MIB, RESULTS, ROOT, alone, machine, note, save, screen, table

EXPECTED = (
    "warm ticks take a third of the first one's time, and send the weights that changed and some"
    " 100 KiB of records"
)
FIRST = datetime(2026, 1, 1, 3, tzinfo=UTC)
LAST = 10
"""Number of last ticks whose median represents a late tick."""


def write_package(path: str, width: int, layers: int, frozen: bool) -> None:
    """Freeze the job in a process of its own."""
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    from retrain_job import make_job

    import trainload

    trainload.freeze(make_job(width, layers, frozen), path)


def line(folder: Path, ticks: int, width: int, layers: int, *, frozen: bool) -> dict[str, Any]:
    """Run the ticks of a line. Returns the time and the bytes sent of each."""
    from retrain_job import write_day

    from trainload.packaging.stores.store import Store
    from trainload.retraining.ticks.tick_records import Ticks, Trained

    folder.mkdir()
    alone(write_package, str(folder / "package.tl"), width, layers, frozen)
    config = {
        "store": "store",
        "line": "digits",
        "package": "package.tl",
        "data": {"files": "data/*.arrow"},
        "evaluation": {"hold_out": 0.2},
        "train": {"steps": 5},
        "cluster": {"backend": "local"},
        "gate": {"require": "eval.loss <= champion.eval.loss * 2"},
        "schedule": {"every": "1d"},
        "retention": {"runs": 2},
    }
    (folder / "retrain.yaml").write_text(json.dumps(config))  # JSON is valid YAML
    draw = np.random.default_rng(0)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "TRAINLOAD_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    found: dict[str, Any] = {"seconds": [], "sent": [], "store": [], "inside": []}
    weights = sum(
        path.stat().st_size for path in (folder / "package.tl" / "weights").glob("*.safetensors")
    )
    for number in range(ticks):
        write_day(folder / "data", number, "good", draw)
        when = FIRST + timedelta(days=number)
        began = time.time()
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "trainload",
            "retrain",
            "tick",
            "retrain.yaml",
            "--at",
            f"{when:%Y-%m-%dT%H:%M:%SZ}",
        ]
        subprocess.run(
            [*command, "--json"], cwd=folder, env=environment, check=True, capture_output=True
        )
        name = f"{when:%Y%m%dT%H%M%SZ}"
        trained = Ticks(Store(folder / "store"), "digits").read_required(Trained, name)
        found["seconds"].append(first_step(Path(trained.run_dir)) - began)
        found["inside"].append(trained.seconds["first step"])
        found["sent"].append(trained.sent_bytes)
        found["store"].append(
            sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
        )
        if number % 10 == 0 or number == ticks - 1:
            note(
                f"tick {number + 1}: {found['seconds'][-1]:.1f} s to the first step,"
                f" {found['sent'][-1]:,} bytes sent"
            )
    return {**found, "weights": weights}


def first_step(run_dir: Path) -> float:
    """Return the end of a run's first step, in seconds since 1970."""
    from trainload.launching.run.journal import read_events

    return next(event.time for event in read_events(run_dir) if event.kind == "step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ticks", type=int, default=50)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS / "retrain_cost.json")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    lines = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, frozen in (("all weights trained", False), ("last layer trained", True)):
            note(name)
            lines[name] = line(
                Path(folder) / name.split()[0],
                options.ticks,
                options.width,
                options.layers,
                frozen=frozen,
            )
    rows = []
    for name, each in lines.items():
        late, sent = median(each["seconds"][-LAST:]), median(each["sent"][-LAST:])
        growth = (each["store"][-1] - each["store"][-LAST]) / (LAST - 1)
        rows.append(
            (
                name,
                f"{each['seconds'][0]:.1f}",
                f"{late:.1f}",
                f"{late / each['seconds'][0]:.2f}",
                f"{each['weights'] / MIB:.2f}",
                f"{sent / MIB:.3f}",
                f"{sent / each['weights']:.3f}",
                f"{growth / MIB:.3f}",
            )
        )
    titles = [
        "",
        "first tick, s",
        "late, s",
        "late / first",
        "weights, MiB",
        "sent, MiB",
        "sent / weights",
        "store grows, MiB a tick",
    ]
    screen().print(
        table(
            f"To the first step of tick 1 and of the last {LAST} of {options.ticks} (median)",
            titles,
            rows,
        )
    )
    save(
        {"expected": EXPECTED, "machine": machine(), "ticks": options.ticks, "lines": lines},
        options.output,
    )


if __name__ == "__main__":
    main()
