"""Check that a repeatedly killed run has the same losses as an undisturbed one.

    python benchmarks/kills.py

A GPT in fp32 with dropout trains on two Ray workers with ZeRO-3: once undisturbed; once with ten
SIGKILLs of a worker, while the node compiles into an empty cache, while a checkpoint is written,
while it is published, and in between; once killed without a restart and resumed on one worker.

The losses of all steps, including those repeated after a kill, must be bitwise equal to those of
the undisturbed run, and so must the last checkpoint; after resuming on another number of workers,
the relative difference of the losses must be at most 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from killer import Kill, Killed, Killer
from measure import RESULTS, machine, note, save, screen, table
from prepare import prepare
from text import byte_windows

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event
    from trainload.packaging.package import Package

HERE = Path(__file__).resolve().parent
WORKERS = 2
STRATEGY = "zero3"
CONTEXT = 32
"""Length of a window in bytes, as in kills_job.py."""
STEPS = 80
ELSEWHERE_STEPS = 30
CHECKPOINT_EVERY = 5
KEEP = 2
BAR = 1e-5
PLAN = (
    "compile",
    "compile",
    "step",
    "write",
    "publish",
    "step",
    "write",
    "publish",
    "write",
    "step",
)
"""Moments of the kills, in order. Compilation is first: it ends once the cache is filled."""

Losses = dict[int, list[tuple[float, float]]]
"""Step -> (loss, gradient norm) of each time the step was done."""


def done_steps(events: Sequence[Event]) -> Losses:
    """Return the steps in the journal, including repeated ones."""
    found: Losses = {}
    for event in events:
        if event.kind == "step":
            found.setdefault(int(event.data["step"]), []).append(
                (event.data["loss"], event.data["gradient_norm"])
            )
    return found


def equal(events: Sequence[Event], reference: Losses) -> bool:
    """Return True if all steps among `events` are bitwise equal to the reference."""
    return all(
        value == reference[step][0]
        for step, values in done_steps(events).items()
        for value in values
    )


def worst(events: Sequence[Event], reference: Losses) -> float:
    """Return the greatest relative difference of a loss from the reference."""
    found = done_steps(events)
    return max(
        abs(loss - reference[step][0][0]) / abs(reference[step][0][0])
        for step, values in found.items()
        for loss, _ in values
    )


def said(name: str) -> Callable[[Event], None]:
    """Return a callback that prints the events of a run, except steps, to stderr."""

    def say(event: Event) -> None:
        if event.kind in ("start", "end", "warning"):
            told = {key: event.data[key] for key in ("step", "message") if key in event.data}
            note(f"{name}: {event.kind} {json.dumps(told)}")

    return say


def shard_digests(checkpoint: Path) -> list[str]:
    """Return the digests of a checkpoint's shards."""
    from trainload.launching.checkpoints.reader import Checkpoint

    return [record.sha256 for record in Checkpoint.open(checkpoint).index.files]


def killed_run(
    package: Package, options: dict[str, Any], run_dir: Path, cache: Path, kills: Sequence[Kill]
) -> tuple[Path, list[Killed]]:
    """Train with kills to the end. Return the last checkpoint and the kills as they happened."""
    import trainload

    killer = Killer(kills, run_dir, cache, keep=KEEP)
    killer.start()
    try:
        result = trainload.launch(
            package,
            run_dir=run_dir,
            max_failures=2 * len(kills),
            on_event=said("killed run"),
            **options,
        )
    finally:
        killer.stop()
    if killer.error is not None:
        raise killer.error
    return result.checkpoint, killer.killed


def elsewhere(
    package: Package, options: dict[str, Any], run_dir: Path, cache: Path, seed: int
) -> None:
    """Train a run that is killed once and not restarted, and resume it on one worker."""
    import trainload

    killer = Killer([Kill(0, "step", seed)], run_dir, cache, keep=KEEP)
    killer.start()
    try:
        trainload.launch(
            package, run_dir=run_dir, max_failures=0, on_event=said("killed for good"), **options
        )
    except trainload.TrainingError as error:
        note(str(error))
    else:
        raise RuntimeError("the run was not killed")
    finally:
        killer.stop()
    trainload.resume(run_dir, workers=1, on_event=said("resumed on one worker"))


def rows(
    killed: Sequence[Killed], events: Sequence[Event], reference: Losses
) -> list[dict[str, Any]]:
    """Return a record of each kill.

    `equal`: True if the steps from this kill to the next are equal to the reference.
    """
    bounds = [*(entry.at for entry in killed), float("inf")]
    found = []
    for number, entry in enumerate(killed):
        between = [event for event in events if bounds[number] < event.time <= bounds[number + 1]]
        found.append(
            {
                "number": entry.kill.number,
                "moment": entry.hit,
                "wanted": entry.kill.moment,
                "seen": entry.seen,
                "step": entry.step,
                "rank": entry.rank,
                "seed": entry.kill.seed,
                "seconds_to_next_step": next(
                    (
                        event.time - entry.at
                        for event in events
                        if event.kind == "step" and event.time > entry.at
                    ),
                    None,
                ),
                "steps": sum(event.kind == "step" for event in between),
                "equal": equal(between, reference),
            }
        )
    return found


def measure(scratch: Path, seed: int, steps: int) -> dict[str, Any]:
    """Measure all three runs."""
    import trainload
    from trainload.launching.run.journal import read_events

    note("freezing")
    package = trainload.open(
        prepare(f"{HERE / 'kills_job.py'}:job", scratch / "job", STRATEGY, WORKERS)
    )
    plan = trainload.plan(package, trainload.Cluster(devices_per_node=WORKERS), STRATEGY)
    data = scratch / "data.npz"
    np.savez(data, tokens=byte_windows(2000, CONTEXT + 1))
    options: dict[str, Any] = {
        "plan": plan,
        "data": data,
        "steps": steps,
        "checkpoint_every": CHECKPOINT_EVERY,
        "keep": KEEP,
    }
    os.environ["TRAINLOAD_CACHE_DIR"] = str(scratch / "cache")
    undisturbed = trainload.launch(
        package, run_dir=scratch / "undisturbed", on_event=said("undisturbed"), **options
    )
    reference = done_steps(read_events(scratch / "undisturbed"))

    # inherited by the driver's workers, as each run starts a local cluster
    cache = scratch / "empty-cache"
    os.environ["TRAINLOAD_CACHE_DIR"] = str(cache)
    chance = random.Random(seed)
    kills = [Kill(number, moment, chance.randrange(2**32)) for number, moment in enumerate(PLAN, 1)]
    checkpoint, killed = killed_run(package, options, scratch / "killed", cache, kills)
    events = read_events(scratch / "killed")

    elsewhere(
        package,
        options | {"steps": min(steps, ELSEWHERE_STEPS)},
        scratch / "elsewhere",
        cache,
        chance.randrange(2**32),
    )
    resumed = read_events(scratch / "elsewhere")
    return {
        "seed": seed,
        "steps": steps,
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.iterdir()),
        "kills": rows(killed, events, reference),
        "all_steps_equal": (
            equal(events, reference) and sorted(done_steps(events)) == list(range(steps))
        ),
        "steps_done_again": sum(len(values) - 1 for values in done_steps(events).values()),
        "last_checkpoint_equal": shard_digests(checkpoint) == shard_digests(undisturbed.checkpoint),
        "elsewhere": {
            "starts": [
                {"step": event.data["step"], "workers": event.data["world"]}
                for event in resumed
                if event.kind == "start"
            ],
            "greatest_relative_difference": worst(resumed, reference),
            "bar": BAR,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    console = screen()
    columns = (
        "kill",
        "moment",
        "what the disk showed",
        "after step",
        "rank",
        "seed",
        "s to next step",
        "steps until next kill",
        "equal",
    )
    lines = [
        (
            str(row["number"]),
            row["moment"],
            row["seen"].replace("-of-00002.safetensors", ""),
            "-" if row["step"] is None else str(row["step"]),
            "-" if row["rank"] is None else str(row["rank"]),
            str(row["seed"]),
            f"{row['seconds_to_next_step']:.1f}",
            str(row["steps"]),
            "yes" if row["equal"] else "NO",
        )
        for row in result["kills"]
    ]
    console.print(
        table(f"{WORKERS} Ray workers, {STRATEGY}, seed {result['seed']}", columns, lines)
    )
    again = result["steps_done_again"]
    console.print(
        f"{result['steps']} steps, {again} of them done again: all bit for bit the undisturbed"
        f" run's: {result['all_steps_equal']}"
    )
    console.print(
        f"last checkpoint, {result['checkpoint_bytes']:,} bytes, bit for bit:"
        f" {result['last_checkpoint_equal']}"
    )
    other = result["elsewhere"]
    console.print(
        f"resumed elsewhere: {other['starts']}: relative difference"
        f" {other['greatest_relative_difference']:.1e}, at most {BAR:.0e}"
    )


def passed(result: dict[str, Any]) -> bool:
    """Return True if all requirements are met."""
    return bool(
        len(result["kills"]) == len(PLAN)
        and all(row["equal"] and row["moment"] == row["wanted"] for row in result["kills"])
        and result["all_steps_equal"]
        and result["last_checkpoint_equal"]
        and result["elsewhere"]["greatest_relative_difference"] <= BAR
    )


def main() -> int:
    """Run the benchmark. Returns 1 if a run differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="random seed; default: a new one",
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULTS / "kills.json")
    arguments = parser.parse_args()
    note(f"seed {arguments.seed}")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trainload-kills-") as scratch:
        result = {"machine": machine(), **measure(Path(scratch), arguments.seed, arguments.steps)}
    result["seconds"] = time.perf_counter() - began
    show(result)
    save(result, arguments.out)
    note(f"written: {arguments.out}")
    return 0 if passed(result) else 1


if __name__ == "__main__":
    sys.exit(main())
