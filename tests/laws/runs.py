"""Start runs on gloo ranks of this machine, without Ray, and read their results."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.laws.worker import train_as_rank
from tests.ports import free_port
from tests.ranks import end, start
from tests.waiting import wait_until

from trainload.launching.run.journal import read_events
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
"""Maximum relative difference between the loss curves of equivalent runs."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run for `worker.py`.

    `options` are options of `trainload.launch`; `resume`, of `trainload.resume`, for a run that
    exists.
    """

    run_dir: Path
    package: Package | None = None
    plan: Plan | None = None
    data: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    resume: Mapping[str, Any] | None = None

    def entry(self) -> dict[str, Any]:
        """Return the entry for `worker.py`."""
        entry: dict[str, Any] = {"run_dir": str(self.run_dir), "port": free_port()}
        if self.resume is not None:
            return {**entry, "resume": dict(self.resume)}
        assert self.package is not None and self.plan is not None
        start = {
            "package": str(self.package.path),
            "plan": self.plan.model_dump_json(),
            "data": str(self.data),
        }
        return {**entry, **start, "options": {"compile": False, **self.options}}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process, with the tests' helpers importable."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **more}


@contextmanager
def ranks(
    world: int,
    runs: Sequence[Run],
    folder: Path,
    act: Callable[[list[dict[str, Any]]], None] = train_as_rank,
) -> Iterator[list[ForkServerProcess]]:
    """Start processes that train `runs`. At the end of the block, kill those that have not ended.

    `act` is called in each process with the entries of the runs.
    """
    entries = [run.entry() for run in runs]
    started: list[ForkServerProcess] = []
    try:
        for rank in range(world):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
            }
            variables = environment(**{name: str(value) for name, value in place.items()})
            started.append(
                start(act, entries, cwd=folder, log=_log(folder, rank), variables=variables)
            )
        yield started
    finally:
        end(started)


def train(
    world: int,
    runs: Sequence[Run],
    folder: Path,
    *,
    once: bool = True,
    act: Callable[[list[dict[str, Any]]], None] = train_as_rank,
) -> list[list[float]]:
    """Train `runs` until they end.

    `act` is that of `ranks`.

    Returns:
        The losses of each run by step; see `curve`.
    """
    with ranks(world, runs, folder, act) as started:
        ended = _wait(started)
        assert ended == [0] * world, "\n".join(
            _log(folder, rank).read_text() for rank in range(world)
        )
    return [curve(run.run_dir, once=once) for run in runs]


def _wait(started: Sequence[ForkServerProcess], patience: float = 30.0) -> list[int | None]:
    """Wait for processes to end, and return their exit codes.

    After one has failed, the others are left after `patience` seconds, with the code None.
    """
    deadline = math.inf
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in started]
        if None not in codes:
            break
        if any(codes):
            deadline = min(deadline, time.monotonic() + patience)
        time.sleep(0.02)
    return codes


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def curve(run_dir: Path, *, of: str = "loss", once: bool = True) -> list[float]:
    """Return the loss of every step of a run, of its last execution. No step may be missing.

    of: "loss", or "gradient_norm" before clipping.
    once: a step that was repeated after a restart must have the same bits each time.
    """
    values: dict[int, float] = {}
    for event in read_events(run_dir):
        if event.kind == "step":
            step, value = int(event.data["step"]), float(event.data[of])
            assert not once or values.get(step, value) == value, (
                f"step {step} of {run_dir.name} was repeated with another {of}"
            )
            values[step] = value
    assert sorted(values) == list(range(len(values)))
    return [values[step] for step in range(len(values))]


def difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the greatest relative difference between two curves of the same length."""
    return max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))


def wait_for_step(
    run_dir: Path, step: int, are_alive: Callable[[], bool], seconds: float = 120.0
) -> None:
    """Wait until a run has completed `step`."""

    def demand_alive() -> None:
        assert are_alive(), f"a rank has ended before step {step}"

    wait_until(
        lambda: any(
            event.kind == "step" and event.data["step"] >= step for event in read_events(run_dir)
        ),
        seconds,
        demand_alive,
    )
