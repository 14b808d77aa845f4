"""Run half an hour with a fault every 40 to 90 seconds, without lost steps or growing memory.

    python benchmarks/soak.py [--minutes 30] [--seed 0]

The run has two workers on a cluster of three nodes; its folder is on a separate disk. The faults
are drawn at random, and each is injected at the first step after its time, once the run has
recovered from the previous one. At the end the run is stopped, and its losses are compared bitwise
with those of an undisturbed run of as many steps on two workers. The memory of the driver, of its
parent process and of the workers is sampled every two seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from fault_cluster import (
    FAULTS,
    HANG_TIMEOUT,
    HERE,
    LIBRARY,
    Fault,
    Nodes,
    Run,
    disk,
    draw,
    fail_storage,
    fill_disk,
    lose_data,
    lose_node,
    losses_by_step,
    preempt,
    set_up,
    write_rows,
)
from faults_op import PACE
from measure import MIB, RESULTS, machine, note, save, screen, table

LEAST, MOST = 40.0, 90.0
EVERY = 2.0
SETTLED = 20.0
"""Seconds after a process's start whose memory growth is ignored: imports, reading weights."""
WORLD = 2


def lose_and_replace(run: Run) -> None:
    """Remove a node; the spare node takes its place, and a new spare node is added."""
    lose_node(run)
    run.nodes.add()


def preempt_and_replace(run: Run) -> None:
    preempt(run)
    run.nodes.add()


def steps_again(run: Run, fault: Fault | None) -> bool:
    """Return True if a run has stepped since its last fault.

    The step must be in a later attempt, unless the run continues through such a fault.
    """
    since = run.at if fault is not None and fault.said != "warning" else 0.0
    start, step = run.last("start", since), run.last("step", run.at)
    return start is not None and step is not None and step.time > start.time


def of(name: str) -> Fault:
    """Return a fault by the beginning of its name."""
    return next(fault for fault in FAULTS if fault.name.startswith(name))


DRAWN: tuple[tuple[Fault, float], ...] = (
    (of("worker killed"), 2),
    (of("worker stopped"), 1),
    (of("worker stuck"), 1),
    (replace(of("node lost, a spare"), act=lose_and_replace), 2),
    (replace(of("preemption"), act=preempt_and_replace), 2),
    (
        replace(
            of("storage"),
            name="storage takes nothing for 10 s",
            act=partial(fail_storage, seconds=10.0),
        ),
        1,
    ),
    (replace(of("disk full"), name="disk full for 10 s", act=partial(fill_disk, seconds=10.0)), 1),
    (
        replace(
            of("data gone"),
            name="data gone for 10 s, worker killed",
            act=partial(lose_data, seconds=10.0),
        ),
        1,
    ),
    (of("newest checkpoint changed"), 1),
    (of("driver lost"), 0.5),
    (of("cluster and head restarted"), 0.5),
)


class Sampler:
    """Thread that samples the resident memory of a run's processes.

    Attributes:
        found: (kind, pid) -> [(age in seconds, bytes), ...].
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self.found: dict[tuple[str, int], list[tuple[float, int]]] = {}
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(EVERY):
            for kind, pid in self._processes():
                try:
                    held = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                        "SC_PAGE_SIZE"
                    )
                    began = int(
                        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
                    ) / os.sysconf("SC_CLK_TCK")
                except (OSError, IndexError):  # the process has just ended
                    continue
                age = float(Path("/proc/uptime").read_text().split()[0]) - began
                self.found.setdefault((kind, pid), []).append((age, held))

    def _processes(self) -> list[tuple[str, int]]:
        found = [("keeper", self._run.keeper)]
        start = self._run.last("start")
        if start is not None:
            found.append(("driver", self._run.driver()))
            found += [("worker", int(name.rpartition(":")[2])) for name in start.data["workers"]]
        return found


def growth(samples: dict[tuple[str, int], list[tuple[float, int]]], kind: str) -> dict[str, Any]:
    """Return the memory growth of the processes of one kind, from `SETTLED` to their end."""
    lives = [
        [each for each in life if each[0] > SETTLED]
        for (name, _), life in samples.items()
        if name == kind
    ]
    lives = [life for life in lives if len(life) > 1 and life[-1][0] - life[0][0] > SETTLED]
    if not lives:
        return {"processes": 0}
    grown = [median(h for _, h in life[-5:]) - median(h for _, h in life[:5]) for life in lives]
    lasted = [life[-1][0] - life[0][0] for life in lives]
    longest = max(range(len(lives)), key=lasted.__getitem__)
    middle = len(lives[longest]) // 2
    half = median(h for _, h in lives[longest][-5:]) - median(
        h for _, h in lives[longest][middle : middle + 5]
    )
    return {
        "processes": len(lives),
        "first_mib": lives[0][0][1] / MIB,
        "last_mib": lives[-1][-1][1] / MIB,
        "greatest_mib": max(h for life in lives for _, h in life) / MIB,
        "began_mib": [life[0][1] / MIB for life in lives],
        "grown_mib": [each / MIB for each in grown],
        "median_grown_mib": median(grown) / MIB,
        "longest_s": lasted[longest],
        "grown_in_longest_mib": grown[longest] / MIB,
        "grown_in_second_half_mib": half / MIB,
    }


def reference(package: Path, data: Path, folder: Path, steps: int) -> dict[int, float]:
    """Return the losses of an undisturbed run on as many workers, as fast as possible."""
    from trainload.launching.run.journal import read_events

    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(WORLD),
        "-m",
        "trainload",
    ]
    command += [
        "--library",
        LIBRARY,
        "launch",
        str(package),
        "--data",
        str(data),
        "--run-dir",
        str(folder),
        "--backend",
        "torchrun",
    ]
    command += [
        "--no-compile",
        "--strategy",
        "zero3",
        "--set",
        "global_batch=8",
        "--steps",
        str(steps),
    ]
    subprocess.run(
        command,
        check=True,
        env={**os.environ, PACE: "0", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    return losses_by_step(read_events(folder))


def soak(scratch: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Run the soak test and return its result."""
    chance = random.Random(seed)
    package, rows = set_up(scratch), write_rows(scratch / "rows.npz")
    nodes = Nodes(WORLD + 1)
    drawn: list[tuple[float, str]] = []
    try:
        with disk(scratch / "disk", 256) as place:
            run = Run(place / "run", rows, nodes, quiet=True)
            patience = [f"{name}=120" for name in ("node_patience", "storage_patience")]
            settings = [
                f"hang_timeout={HANG_TIMEOUT}",
                "global_batch=8",
                "max_failures=10",
                *patience,
            ]
            options = [part for setting in settings for part in ("--set", setting)]
            run.launch(
                package,
                "--nodes",
                str(WORLD),
                "--steps",
                "1000000",
                "--checkpoint-every",
                "50",
                *options,
            )
            sampler = Sampler(run)
            try:
                run.reach(60)
                began = time.monotonic()
                due = began
                fault: Fault | None = None
                while True:
                    due = max(due, time.monotonic() - MOST) + chance.uniform(LEAST, MOST)
                    if due - began > 60 * minutes:
                        break
                    time.sleep(max(0.0, due - time.monotonic()))
                    run.wait(partial(steps_again, run, fault))
                    fault = draw(chance, DRAWN)
                    fault.act(run)
                    drawn.append((time.monotonic() - began, fault.name))
                    step = run.last("step")
                    note(
                        f"{drawn[-1][0]:6.0f} s  {fault.name}, at step"
                        f" {None if step is None else step.data['step']}"
                    )
                run.wait(partial(steps_again, run, fault))
                seconds = time.monotonic() - began
                (run.folder / "stop").touch()
                run.join()
            finally:
                sampler.close()
                run.end()
            return result(run, package, scratch, seconds, drawn, sampler)
    finally:
        nodes.close()


def result(
    run: Run,
    package: Path,
    scratch: Path,
    seconds: float,
    drawn: Sequence[tuple[float, str]],
    sampler: Sampler,
) -> dict[str, Any]:
    """Return the result of a soak test."""
    from trainload.launching.checkpoints.index import published

    found = losses_by_step(run.events)
    done = max(found) + 1
    wanted = reference(package, run.data, scratch / "reference", done)
    saved, lost = 0, 0
    for event in run.events:
        if event.kind == "checkpoint" and event.data["step"] not in run.destroyed:
            saved = int(event.data["step"])
        lost += event.kind == "start" and int(event.data["step"]) < saved
    last = run.events[-1]
    return {
        "seconds": seconds,
        "faults": dict(Counter(name for _, name in drawn)),
        "attempts": sum(event.kind == "start" for event in run.events),
        "steps": done,
        "steps_done_again": sum(event.kind == "step" for event in run.events) - len(found),
        "steps_missing": done - len(found),
        "losses_that_differ": sum(found.get(step) != loss for step, loss in wanted.items()),
        "checkpoints_lost": lost,
        "ended": last.kind,
        "last_checkpoint": max(published(run.folder)),
        "journal_bytes": (run.folder / "events.jsonl").stat().st_size,
        "memory": {kind: growth(sampler.found, kind) for kind in ("keeper", "driver", "worker")},
    }


def show(result: dict[str, Any]) -> None:
    """Print a result."""
    facts = [
        (name.replace("_", " "), f"{value:.0f}" if isinstance(value, float) else str(value))
        for name, value in result.items()
    ]
    screen().print(
        table(
            "A run with many faults",
            ("", "value"),
            [fact for fact in facts if fact[0] not in ("memory", "faults")],
        )
    )
    screen().print(
        table(
            "Faults",
            ("fault", "times"),
            [(name, str(times)) for name, times in sorted(result["faults"].items())],
        )
    )
    columns = (
        "resident memory, MiB",
        "processes",
        "first",
        "last",
        "greatest",
        "grown (median)",
        "longest life s",
        "grown in it",
        "in its second half",
    )
    keys = (
        "first_mib",
        "last_mib",
        "greatest_mib",
        "median_grown_mib",
        "longest_s",
        "grown_in_longest_mib",
        "grown_in_second_half_mib",
    )
    lines = [
        (kind, str(each["processes"]), *(f"{each[key]:.1f}" if key in each else "" for key in keys))
        for kind, each in result["memory"].items()
    ]
    screen().print(table("Memory", columns, lines))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as scratch:
        found = soak(Path(scratch), arguments.minutes, arguments.seed)
    show(found)
    save({"machine": machine(), "seed": arguments.seed, **found}, arguments.output)


if __name__ == "__main__":
    main()
