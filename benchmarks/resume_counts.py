"""Count how often a run trains on each row when it is stopped, killed and resized within epochs.

    python benchmarks/resume_counts.py [--rows 1009] [--steps 240]

Every row has its own weight, from which each step with that row subtracts one, so the trained
package contains the counts. A run of several epochs is stopped at random steps and resumed with
another number of workers; between the stops a worker is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from measure import RESULTS, machine, note, save, screen, table

ROOT = Path(__file__).resolve().parents[1]
WORLDS = (4, 3, 1, 2, 4)
STRATEGIES = ("zero3", "zero2", "single", "zero0", "zero3")
CHECKPOINT_EVERY = 7


class Killer:
    """Callback for a run's events that kills the last rank when the run reaches a step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._workers: list[str] = []
        self.killed = 0

    def __call__(self, event: Any) -> None:
        if event.kind == "start":
            self._workers = list(event.data["workers"])
        if event.kind == "step" and event.data["step"] >= self._step and not self.killed:
            self.killed = 1
            os.kill(int(self._workers[-1].rpartition(":")[2]), signal.SIGKILL)


def train(folder: Path, rows: int, steps: int, seed: int) -> dict[str, Any]:
    """Train the run and return the results."""
    from tests.launch.counted import BATCH, counts, demand_exact, freeze_counts

    import trainload
    from trainload.launching.run.journal import read_events

    chance = random.Random(seed)
    package, data = freeze_counts(rows, steps, folder)
    stops = [*sorted(chance.sample(range(20, steps - 20), len(WORLDS) - 1)), steps]
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=WORLDS[0]), STRATEGIES[0])
    run, trained = folder / "run", folder / "trained.tl"
    killed = 0
    for number, (stop, world, strategy) in enumerate(zip(stops, WORLDS, STRATEGIES, strict=True)):
        first = 0 if number == 0 else stops[number - 1]
        killer = Killer(first + max(1, (stop - first) // 2))
        if number == 0:
            options: dict[str, Any] = {
                "steps": stop,
                "compile": False,
                "output": trained,
                "checkpoint_every": CHECKPOINT_EVERY,
            }
            trainload.launch(package, plan, data, run_dir=run, on_event=killer, **options)
        else:
            trained.rename(folder / f"before-{number}.tl")
            trainload.resume(run, workers=world, strategy=strategy, steps=stop, on_event=killer)
        killed += killer.killed
        found = counts(trained)
        demand_exact(found, stop)
        note(f"{world} workers, {strategy}, to step {stop}: {dict(Counter(found.tolist()))}")
    events = [event for event in read_events(run) if event.kind == "step"]
    return {
        "rows": rows,
        "rows_of_a_step": BATCH,
        "steps": steps,
        "stops": stops,
        "workers": WORLDS,
        "workers_killed": killed,
        "steps_done_again": len(events) - len({event.data["step"] for event in events}),
        "rows_by_count": {
            str(count): times for count, times in sorted(Counter(found.tolist()).items())
        },
        "expected": {
            str(steps * BATCH // rows): rows - steps * BATCH % rows,
            str(steps * BATCH // rows + 1): steps * BATCH % rows,
        },
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1009)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "resume_counts.json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import ray

    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["TRAINLOAD_CACHE_DIR"] = str(Path(scratch) / "cache")
        ray.init(
            address="local", num_cpus=max(WORLDS), include_dashboard=False, log_to_driver=False
        )
        try:
            found = train(Path(scratch), arguments.rows, arguments.steps, arguments.seed)
        finally:
            ray.shutdown()
    screen().print(
        table(
            "How often each row was trained on",
            ("", "value"),
            [(name, str(value)) for name, value in found.items()],
        )
    )
    save({"machine": machine(), "seed": arguments.seed, **found}, arguments.output)


if __name__ == "__main__":
    main()
