"""Compare the time to the first step of `trainload launch` with that of a Ray Train script.

    python benchmarks/startup.py

Measured from the command to the end of its first optimizer step; the script compiles the same
model. Both start a local Ray cluster and two gloo workers. Cold: the caches of compiled graphs are
empty. Warm: they are those of the previous run. The systems alternate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import EXAMPLE, RESULTS, ROOT, machine, median, note, save, screen, see_example, table

HERE = Path(__file__).resolve().parent
STEPS = 3
RUN_SECONDS = 900.0
STRATEGIES = ("zero3", "zero0")
PEER = "Ray Train, torch.compile"


class StartError(Exception):
    """A command failed; the message is the end of its output."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs that all runs share. `scratch`: parent of their output folders."""

    package: Path
    data: Path
    scratch: Path


def run(system: str, inputs: Inputs, cache: Path) -> dict[str, float]:
    """Run one command to its end.

    Returns:
        first_step: seconds from the command to the end of the first step; whole: to its end; for
        trainload also the duration of its stages in seconds.
    """
    folder = Path(tempfile.mkdtemp(dir=inputs.scratch))
    environment = {
        **os.environ,
        "TRAINLOAD_CACHE_DIR": str(cache / "trainload"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRAINLOAD_STATE_DIR": str(cache / "state"),
    }
    if system == PEER:
        out = folder / "time"
        options = [
            "--data",
            inputs.data,
            "--out",
            out,
            "--storage",
            folder / "ray",
            "--steps",
            STEPS,
        ]
        command = [sys.executable, HERE / "peer_ray_train.py", *options]
    else:
        strategy = system.rpartition(" ")[2]
        options = [
            "--data",
            inputs.data,
            "--workers",
            2,
            "--strategy",
            strategy,
            "--steps",
            STEPS,
            "--run-dir",
            folder / "run",
            "--json",
        ]
        command = [sys.executable, "-m", "trainload", "launch", inputs.package, *options]
    began = time.time()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=inputs.scratch,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    whole = time.time() - began
    if done.returncode != 0:
        raise StartError(f"{system} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    if system == PEER:
        return {"first_step": float(out.read_text()) - began, "whole": whole}
    return {**_journal(folder / "run", began), "whole": whole}


def _journal(run_dir: Path, began: float) -> dict[str, float]:
    from trainload.launching.run.journal import read_events

    events = read_events(run_dir)
    found = {"first_step": next(event.time for event in events if event.kind == "step") - began}
    for event in events:
        if event.kind == "start":
            found["loop begins"] = event.time - began
        elif event.kind == "stage" and event.data["name"] in ("data", "compile"):
            found[str(event.data["name"])] = float(event.data["seconds"])
    return found


def prepare_inputs(scratch: Path) -> Inputs:
    """Build the demo's corpus and its package."""
    see_example()
    import corpus
    from model import Config

    note("preparing: corpus and package")
    made = corpus.build(scratch / "corpus", Config().context)
    package = scratch / "gpt.tl"
    command = [
        sys.executable,
        "-m",
        "trainload",
        "freeze",
        f"{EXAMPLE / 'job.py'}:job",
        "-o",
        str(package),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Inputs(package, made.train, scratch)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cold", type=int, default=2, help="number of runs with empty caches")
    parser.add_argument("--warm", type=int, default=5, help="number of runs with full caches")
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.json")
    arguments = parser.parse_args()
    began = time.perf_counter()
    systems = [PEER, *(f"trainload {strategy}" for strategy in STRATEGIES)]
    figures: dict[str, dict[str, list[dict[str, float]]]] = {
        system: {"cold": [], "warm": []} for system in systems
    }
    with tempfile.TemporaryDirectory(prefix="trainload-startup-") as name:
        inputs = prepare_inputs(Path(name))
        for number in range(arguments.cold + arguments.warm):
            kind = "cold" if number < arguments.cold else "warm"
            for system in systems:
                # Each cold run has its own cache; warm runs continue with that of the last cold
                # run.
                cache = (
                    inputs.scratch
                    / f"cache-{min(number, arguments.cold - 1)}-{system.replace(' ', '-')}"
                )
                cache.mkdir(mode=0o700, exist_ok=True)
                try:
                    found = run(system, inputs, cache)
                except StartError as error:
                    note(str(error))
                    return 1
                figures[system][kind].append(found)
                note(f"{system}, {kind}: first step after {found['first_step']:.1f} s")
    first = {
        system: {
            kind: median(run["first_step"] for run in runs) for kind, runs in kinds.items() if runs
        }
        for system, kinds in figures.items()
    }
    ratios = {
        system: {kind: value / first[PEER][kind] for kind, value in kinds.items()}
        for system, kinds in first.items()
        if system != PEER
    }
    rows = [
        (
            system,
            *(f"{kinds[kind]:.1f}" if kind in kinds else "-" for kind in ("cold", "warm")),
            *(
                f"{ratios[system][kind]:.2f}" if kind in ratios.get(system, {}) else ""
                for kind in ("cold", "warm")
            ),
        )
        for system, kinds in first.items()
    ]
    columns = ("seconds from command to first step", "cold", "warm", "cold / peer", "warm / peer")
    screen().print(
        table("start-up, 2 workers on a local Ray cluster", columns, rows, marked=systems[1:])
    )
    settings = {"cold": arguments.cold, "warm": arguments.warm, "workers": 2}
    result: dict[str, Any] = {
        "machine": machine(),
        "settings": settings,
        "runs": figures,
        "first_step_seconds": first,
        "ratios": ratios,
    }
    save(result | {"seconds": time.perf_counter() - began}, arguments.out)
    note(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
