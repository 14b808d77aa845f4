"""Compare the time to the first step of `trainload launch` with that of a Ray Train script.

    python benchmarks/startup.py

Measured from the command to the end of its first optimizer step; the script compiles the same
model. Both train with two gloo workers, on a local Ray cluster that the command starts or on one
that is up. Cold: the caches of compiled graphs are empty. Warm: they are those of the previous run.
The systems alternate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import EXAMPLE, RESULTS, ROOT, machine, median, note, save, screen, see_example, table

HERE = Path(__file__).resolve().parent
STEPS = 3
RUN_SECONDS = 900.0
STRATEGIES = ("zero3", "zero0")
PEER = "Ray Train, torch.compile"
LOCAL, UP = "own cluster", "cluster that is up"
_LOOK_SECONDS = 0.02
_PROCESSES = {
    "gcs_server": "Ray's head begins",
    "raylet": "Ray's node begins",
    "ray::IDLE": "Ray's first worker is ready",
    "trainload forks": "the fork server begins to import",
    "ray::NodeActor": "the node's actor begins",
    "rank": "a rank is forked",
    "rank 0": "rank 0 meets the others",
}
"""Name of a process -> what its first appearance shows."""


class StartError(Exception):
    """A command failed; the message is the end of its output."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs that all runs share. `scratch`: parent of their output folders."""

    package: Path | str
    data: Path
    scratch: Path


@dataclass(frozen=True, slots=True)
class Run:
    """Times of a run in seconds since its command.

    Attributes:
        first_step: end of its first step.
        whole: end of the command.
        moments: (seconds, what happened first), in order; empty for the script.
    """

    first_step: float
    whole: float
    moments: list[tuple[float, str]]


def cache_variables(cache: Path) -> dict[str, str]:
    """Return the environment variables of a folder with all caches."""
    cache.mkdir(mode=0o700, exist_ok=True)
    return {
        "TRAINLOAD_CACHE_DIR": str(cache / "trainload"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRAINLOAD_STATE_DIR": str(cache / "state"),
    }


def run(system: str, inputs: Inputs, cache: Path, address: str | None) -> Run:
    """Run one command to its end."""
    folder = Path(tempfile.mkdtemp(dir=inputs.scratch))
    environment = {**os.environ, **cache_variables(cache)}
    out, run_dir = folder / "time", folder / "run"
    common = ["--data", inputs.data, "--steps", STEPS]
    there = [] if address is None else ["--address", address]
    if system == PEER:
        command = [sys.executable, HERE / "peer_ray_train.py", *common, *there]
        command += ["--out", out, "--storage", folder / "ray"]
    else:
        command = [sys.executable, "-m", "trainload", "launch", inputs.package, *common, *there]
        command += ["--workers", 2, "--strategy", system.rpartition(" ")[2]]
        command += ["--run-dir", run_dir, "--json"]
    output = folder / "output"
    began = time.time()
    with output.open("wb") as file, seen_processes() as seen:
        status = subprocess.run(
            [str(part) for part in command],
            cwd=inputs.scratch,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=RUN_SECONDS,
            check=False,
        ).returncode
    whole = time.time() - began
    if status != 0:
        raise StartError(f"{system} ended with status {status}:\n{output.read_text()[-2000:]}")
    if system == PEER:
        return Run(float(out.read_text()) - began, whole, [])
    moments = [(when - began, _PROCESSES[name]) for name, when in seen.items()]
    events = first_events(run_dir)
    moments += [(when - began, what) for what, when in events.items()]
    return Run(events["the first step has ended"] - began, whole, sorted(moments))


def first_events(run_dir: Path) -> dict[str, float]:
    """Return what the journal says -> its time, in seconds since 1970."""
    from trainload.launching.run.journal import read_events

    found: dict[str, float] = {}
    for event in read_events(run_dir):
        if event.kind == "start":
            found["the loop begins"] = event.time
        elif event.kind == "step" and event.data["step"] == 0:
            found["the first step has ended"] = event.time
    return found


@contextmanager
def seen_processes() -> Iterator[dict[str, float]]:
    """Watch for the first new process of each name of `_PROCESSES` within the context.

    Yields:
        Name -> time in seconds since 1970 at which it was seen.
    """
    before = {path.name for path in Path("/proc").glob("[0-9]*")}
    seen: dict[str, float] = {}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            for path in Path("/proc").glob("[0-9]*"):
                if path.name in before:
                    continue
                try:
                    name = (path / "comm").read_text().strip()
                except OSError:  # it has ended
                    continue
                name = name.partition(".")[0]  # of an actor that is being called
                if name in _PROCESSES:
                    seen.setdefault(name, time.time())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


@contextmanager
def cluster_that_is_up(cache: Path) -> Iterator[str]:
    """Run a Ray cluster of two CPUs within the context, whose processes use a cache.

    Yields:
        Its address.
    """
    os.environ |= cache_variables(cache)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        yield str(cluster.address)
    finally:
        cluster.shutdown()


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


def waterfall(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """Return the moments of the run whose first step is the median one."""
    return sorted(runs, key=lambda each: each.first_step)[len(runs) // 2].moments


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
    kinds = [
        *(["cold"] if arguments.cold else []),
        *(f"warm, {cluster}" for cluster in (LOCAL, UP) if arguments.warm),
    ]
    runs: dict[str, dict[str, list[Run]]] = {
        system: {kind: [] for kind in kinds} for system in systems
    }
    with tempfile.TemporaryDirectory(prefix="trainload-startup-") as name:
        inputs = prepare_inputs(Path(name))

        def compare(
            kind: str, system: str, cache: str, address: str | None, *, counts: bool = True
        ) -> None:
            found = run(system, inputs, inputs.scratch / f"cache-{cache}", address)
            if counts:
                runs[system][kind].append(found)
            said = "" if counts else " (fills the cache, does not count)"
            note(f"{system}, {kind}: first step after {found.first_step:.1f} s{said}")

        # Each cold run has its own cache; warm runs continue with that of the last cold run.
        last = max(arguments.cold - 1, 0)
        for number in range(arguments.cold):
            for system in systems:
                compare("cold", system, f"{number}-{systems.index(system)}", None)
        for _ in range(arguments.warm):
            for system in systems:
                compare(f"warm, {LOCAL}", system, f"{last}-{systems.index(system)}", None)
        if arguments.warm:
            # the cluster's processes have one cache, whichever command uses them
            with cluster_that_is_up(inputs.scratch / "cache-up") as address:
                for number in range(arguments.warm + 1):
                    for system in systems:
                        compare(f"warm, {UP}", system, "up", address, counts=number > 0)
    first = {
        system: {kind: median(each.first_step for each in of_kind[kind]) for kind in kinds}
        for system, of_kind in runs.items()
    }
    ratios = {
        system: {kind: value / first[PEER][kind] for kind, value in of_kind.items()}
        for system, of_kind in first.items()
        if system != PEER
    }
    rows = [
        (
            system,
            *(
                f"{of_kind[kind]:.1f}"
                + (f" ({ratios[system][kind]:.2f})" if system in ratios else "")
                for kind in kinds
            ),
        )
        for system, of_kind in first.items()
    ]
    title = "start-up, 2 workers: seconds to the first step (ratio to Ray Train)"
    screen().print(table(title, ("system", *kinds), rows, marked=systems[1:]))
    falls = {kind: waterfall(runs[systems[1]][kind]) for kind in kinds if kind.startswith("warm")}
    for kind, moments in falls.items():
        steps = [(f"{when:.1f}", what) for when, what in moments]
        screen().print(table(f"{systems[1]}, {kind}", ("seconds", "what"), steps, marked=()))
    settings = {"cold": arguments.cold, "warm": arguments.warm, "workers": 2}
    result: dict[str, Any] = {
        "machine": machine(),
        "settings": settings,
        "runs": {
            system: {
                kind: [{"first_step": each.first_step, "whole": each.whole} for each in of]
                for kind, of in of_kind.items()
            }
            for system, of_kind in runs.items()
        },
        "waterfalls": falls,
        "first_step_seconds": first,
        "ratios": ratios,
    }
    save(result | {"seconds": time.perf_counter() - began}, arguments.out)
    note(f"written: {arguments.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StartError as error:
        note(str(error))
        sys.exit(1)
