"""Compare step time and memory of trainload with torch's own strategies on two gloo workers.

    python benchmarks/steps.py

The workers have one thread; model, batch and precision are the same. Every system has its own pair
of processes with its own compile cache. They alternate: in each round, each system runs a few steps
while all others wait on a pipe. The result is the median over the rounds of a round's median step
time on the slower rank.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import (
    EXAMPLE,
    MIB,
    RESULTS,
    machine,
    median,
    note,
    save,
    screen,
    spread,
    table,
)
from prepare import prepare
from rich.console import Console
from systems import System
from workers import WORLD_SIZE, Round, Settings, WorkerError, Workers

STRATEGIES = ("zero0", "zero1", "zero3")
PEERS = (
    System("DDP", "ddp", compiled=False),
    System("DDP compiled", "ddp"),
    System("FSDP2", "fsdp2", compiled=False),
    System("FSDP2 compiled", "fsdp2"),
)
FLAT = tuple(
    System(f"trainload {strategy} flat", "trainload", strategy=strategy, flat=True)
    for strategy in ("zero0", "zero3")
)
"""They are measured on request."""
SYSTEMS = (
    *PEERS,
    *(System(f"trainload {strategy}", "trainload", strategy=strategy) for strategy in STRATEGIES),
    *FLAT,
)
_OTHERS = Path(__file__).with_name("step_jobs.py")
JOBS = {
    "GPT fp32": f"{EXAMPLE / 'job.py'}:job_fp32",
    "GPT bf16": f"{EXAMPLE / 'job.py'}:job",
    "GPT 12 layers": f"{_OTHERS}:gpt_12_layers",
    "GPT 12 layers bf16": f"{_OTHERS}:gpt_12_layers_bf16",
    "Llama": f"{_OTHERS}:llama",
    "ViT": f"{_OTHERS}:vit",
    "BERT": f"{_OTHERS}:bert",
    "CNN": f"{_OTHERS}:cnn",
}
"""Name -> job. bf16 is autocast in the blocks, with fp32 parameters; the others are in fp32."""
BATCHES = 64
"""Number of batches that a worker holds in memory and cycles through."""


def measure(
    job: str, names: list[str], rounds: int, steps: int, rows: int, scratch: Path
) -> dict[str, Any]:
    """Measure the systems with these names on a job of `JOBS`.

    Returns:
        Name -> measurements, in the order of `SYSTEMS`; a failed system has only `error`.
    """
    chosen = [system for system in SYSTEMS if system.name in names]
    note(f"{job}: freezing")
    folder = scratch / job.replace(" ", "-")
    package = prepare(
        JOBS[job],
        folder,
        ",".join(STRATEGIES),
        WORLD_SIZE,
        batch=rows * WORLD_SIZE,
        batches=BATCHES,
    )
    settings = Settings(job, JOBS[job], package, folder, scratch, rows, BATCHES)
    figures: dict[str, Any] = {}
    pairs: dict[str, Workers] = {}
    runs: dict[str, list[list[Round]]] = {system.name: [] for system in chosen}
    with contextlib.ExitStack() as stack:
        for system in chosen:
            note(f"{job}: starting {system.name}")
            workers = stack.enter_context(Workers(system, settings))
            try:
                figures[system.name] = workers.wait_ready()
                workers.run(steps)  # warmup
                pairs[system.name] = workers
            except WorkerError as error:
                note(str(error))
                figures[system.name] = {"error": str(error).strip().splitlines()[-1]}
        for number in range(rounds):
            note(f"{job}: round {number + 1} of {rounds}")
            for name, workers in pairs.items():
                runs[name].append(workers.run(steps))
    return {name: figures[name] | (_figures(runs[name]) if runs[name] else {}) for name in figures}


def _figures(rounds: list[list[Round]]) -> dict[str, Any]:
    """Return the summary of one system.

    Seconds are those of the slower rank; bytes are those of the larger rank, and of each rank in
    `ranks`.
    """
    of_rounds = [max(median(rank.seconds) for rank in ranks) for ranks in rounds]
    memory = [
        {
            f"{kind}_bytes": max(ranks[number].memory[kind] for ranks in rounds)
            for kind in ("peak", "private", "since_start")
        }
        for number in range(WORLD_SIZE)
    ]
    return {
        "step_seconds": median(of_rounds),
        "spread": spread(of_rounds),
        "rounds": of_rounds,
        "loss": [rank.loss for rank in rounds[-1]],
        **{kind: max(rank[kind] for rank in memory) for kind in memory[0]},
        "ranks": memory,
    }


def ratios(figures: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Return trainload's figures divided by each peer's.

    For example {"step_seconds": {"trainload zero3": {"DDP": 1.1}}}. Below 1: trainload needs less.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in ("step_seconds", "peak_bytes", "private_bytes"):
        found[kind] = {
            ours: {
                peer.name: figures[ours][kind] / figures[peer.name][kind]
                for peer in PEERS
                if peer.name in figures and kind in figures[peer.name]
            }
            for ours in figures
            if ours.startswith("trainload") and kind in figures[ours]
        }
    return found


def show(job: str, figures: dict[str, Any], console: Console) -> None:
    """Print one job's tables."""
    measured = {name: entry for name, entry in figures.items() if "step_seconds" in entry}
    ours = [name for name in measured if name.startswith("trainload")]
    columns = (
        "system",
        "step ms",
        "+-",
        "peak MiB",
        "private MiB",
        "on the other rank",
        "first step s",
        "loss",
    )
    rows = [
        (
            name,
            f"{1000 * entry['step_seconds']:.1f}",
            "-" if entry["spread"] is None else f"{100 * entry['spread']:.0f} %",
            f"{entry['peak_bytes'] / MIB:.0f}",
            f"{entry['private_bytes'] / MIB:.0f}",
            f"{min(rank['private_bytes'] for rank in entry['ranks']) / MIB:.0f}",
            f"{entry['build_seconds'] + entry['first_step_seconds']:.1f}",
            f"{median(entry['loss']):.3f}",
        )
        for name, entry in measured.items()
    ]
    console.print(
        table(f"{job}, {WORLD_SIZE} gloo workers of one thread", columns, rows, marked=ours)
    )
    for kind, title in (
        ("step_seconds", "step time"),
        ("private_bytes", "private peak memory, with a peer's compiler"),
    ):
        against = ratios(figures)[kind]
        peers = [peer.name for peer in PEERS if peer.name in measured]
        if not peers or not ours:
            break
        lines = [(name, *(f"{against[name][peer]:.2f}" for peer in peers)) for name in ours]
        console.print(table(f"{job}: {title}, trainload / peer", ("", *peers), lines))
    for name, entry in figures.items():
        if "error" in entry:
            console.print(f"{name} failed: {entry['error']}", style="red", markup=False)


def main() -> int:
    """Run the benchmark. Returns 1 if a system failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps per system and round")
    parser.add_argument("--rows", type=int, default=8, help="rows per batch of a worker")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--only", help="comma-separated names of systems")
    parser.add_argument("--out", type=Path, default=RESULTS / "steps.json")
    arguments = parser.parse_args()
    names = (
        arguments.only.split(",") if arguments.only else [s.name for s in SYSTEMS if s not in FLAT]
    )
    unknown = set(names) - {system.name for system in SYSTEMS}
    if unknown:
        parser.error(
            f"no such system: {', '.join(sorted(unknown))}; there are"
            f" {', '.join(s.name for s in SYSTEMS)}"
        )
    began = time.perf_counter()
    result: dict[str, Any] = {
        "machine": machine(),
        "settings": {
            "workers": WORLD_SIZE,
            "threads": 1,
            "rows": arguments.rows,
            "rounds": arguments.rounds,
            "steps": arguments.steps,
        },
        "jobs": {},
    }
    failed = False
    console = screen()
    with tempfile.TemporaryDirectory(prefix="trainload-steps-") as scratch:
        for job in arguments.jobs:
            figures = measure(
                job, names, arguments.rounds, arguments.steps, arguments.rows, Path(scratch)
            )
            result["jobs"][job] = {"systems": figures, "ratios": ratios(figures)}
            failed |= any("error" in entry for entry in figures.values())
            show(job, figures, console)
    result["seconds"] = time.perf_counter() - began
    save(result, arguments.out)
    note(f"written: {arguments.out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
