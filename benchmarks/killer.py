"""Kill ranks of a run on Ray with SIGKILL at planned moments, and report the actual moment.

A moment such as the publication of a checkpoint lasts a few milliseconds. Therefore the workers are
first stopped (SIGSTOP), which does not affect their state; if the disk then shows another moment
than the planned one, they continue and the next opportunity is awaited. The reported moment is what
the disk shows after the kill.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainload.launching.checkpoints.index import CHECKPOINTS, INDEX, published
from trainload.launching.run.journal import Event, read_events

LOOK_SECONDS = 0.0005
COMPILING = ".part"
"""Suffix of incomplete folders in the cache of compiled graphs."""
WAIT_SECONDS = 0.02
WORKER_NAME = "rank"
"""Beginning of the names of processes of ranks."""
SERVER_NAME = "trainload forks"
"""Name of the process from which ranks are forked."""
Found = TypeVar("Found")
MOMENTS = ("compile", "step", "write", "publish")


@dataclass(frozen=True, slots=True)
class Kill:
    """A planned kill: one of `MOMENTS`, and the seed of its random choices."""

    number: int
    moment: str
    seed: int


@dataclass(frozen=True, slots=True)
class Killed:
    """A kill that has been carried out.

    Attributes:
        step: the last step whose loss was in the journal; None before the first.
        rank: rank of the process; None if it was compiling, when there are no ranks yet.
        hit: the moment that the disk showed.
        seen: description of what the disk showed.
        at: time in seconds since 1970.
    """

    kill: Kill
    step: int | None
    pid: int
    rank: int | None
    hit: str
    seen: str
    at: float


class Killer(threading.Thread):
    """Thread that kills workers of a run that this process drives, one after another.

    `killed` lists the kills that were carried out; `error` is set if one failed.

    Args:
        kills: planned kills, in order.
        run_dir: the run's folder; it need not exist yet.
        cache_dir: the node's cache.
        keep: number of checkpoints that the run keeps.
    """

    def __init__(
        self, kills: Sequence[Kill], run_dir: Path, cache_dir: Path, *, keep: int = 2
    ) -> None:
        super().__init__(name="killer", daemon=True)
        self._kills, self._run_dir, self._cache = kills, run_dir, cache_dir / "compiled"
        self._keep = keep
        self._since = 0.0
        self._ended = threading.Event()
        self.killed: list[Killed] = []
        self.error: Exception | None = None

    def stop(self) -> None:
        """End the thread, even if kills remain."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        try:
            for kill in self._kills:
                done = self._carry_out(kill)
                self.killed.append(done)
                self._since = done.at
        except _Ended:
            return
        except Exception as error:  # noqa: BLE001  # reported by the thread that joins
            self.error = error

    # One kill

    def _carry_out(self, kill: Kill) -> Killed:
        chance = random.Random(kill.seed)
        if kill.moment == "compile":
            self._await(self._compiling)
            self._pause(chance.uniform(0.5, 12.0))
        else:
            self._await_step()
            self._pause(chance.uniform(0.0, 1.0))
        workers = worker_pids()  # it takes longer than a checkpoint's publication
        while True:
            self._await(lambda: self._sees(kill.moment), LOOK_SECONDS)
            if kill.moment == "write":
                self._pause(chance.uniform(0.0, 0.02))
            with _stopped(workers):
                if self._sees(kill.moment) and workers:
                    pid, rank = self._victim(kill, chance, workers)
                    at = time.time()
                    os.kill(pid, signal.SIGKILL)
                    _await_end(pid)
                    hit, seen = self._look()
                    return Killed(kill, self._last_step(), pid, rank, hit, seen, at)
            self._pause(chance.uniform(0.0, 0.05))

    def _victim(
        self, kill: Kill, chance: random.Random, workers: Sequence[int]
    ) -> tuple[int, int | None]:
        """Return (pid, rank) of the process to kill.

        While compiling: the process that compiles. While publishing: rank 0, which publishes.
        Otherwise any.
        """
        if kill.moment == "compile":
            return next(pid for pid in workers if _holds_lock(pid, self._cache)), None
        ranks = self._ranks()
        rank = 0 if kill.moment == "publish" else chance.randrange(len(ranks))
        assert ranks[rank] in workers, f"the journal names {ranks}, there are {workers}"
        return ranks[rank], rank

    # State on disk

    def _sees(self, moment: str) -> bool:
        if moment == "compile":
            return self._compiling()
        return self._look()[0] == moment

    def _compiling(self) -> bool:
        drafts = self._cache.is_dir() and any(
            name.endswith(COMPILING) for name in os.listdir(self._cache)
        )
        return drafts and any(_holds_lock(pid, self._cache) for pid in worker_pids())

    def _look(self) -> tuple[str, str]:
        """Return (moment, description of its sign on the disk)."""
        if self._compiling_since_kill():
            return "compile", "a half-made build"
        folder = self._run_dir / CHECKPOINTS
        steps = sorted(folder.glob("step-*")) if folder.is_dir() else []
        for step in steps:
            if not (step / INDEX).is_file():
                with suppress(FileNotFoundError):
                    inside = sorted(path.name for path in step.rglob("rank-*"))
                    return "write", f"a draft with {', '.join(inside) or 'nothing'}"
            if any(step.rglob("*.done")):
                return "publish", "the index is written, the marks not removed"
        if len(published(self._run_dir)) > self._keep:
            return "publish", "published, the oldest not deleted yet"
        return "step", "no draft"

    def _compiling_since_kill(self) -> bool:
        started = any(
            event.kind == "start" and event.time > self._since for event in self._events()
        )
        return (
            not started
            and self._cache.is_dir()
            and any(name.endswith(COMPILING) for name in os.listdir(self._cache))
        )

    # State in the journal

    def _events(self) -> list[Event]:
        return read_events(self._run_dir)

    def _await_step(self) -> Event:
        """Wait for the first step after the last kill."""
        return self._await(
            lambda: next(
                (
                    event
                    for event in self._events()
                    if event.kind == "step" and event.time > self._since
                ),
                None,
            )
        )

    def _last_step(self) -> int | None:
        steps = [int(event.data["step"]) for event in self._events() if event.kind == "step"]
        return steps[-1] if steps else None

    def _ranks(self) -> list[int]:
        """Return the pids of the ranks from the last start event. All are on this machine."""
        named = [event.data["workers"] for event in self._events() if event.kind == "start"][-1]
        here = socket.gethostname()
        assert all(name.startswith(f"{here}:") for name in named)
        return [int(name.rpartition(":")[2]) for name in named]

    # Waiting

    def _await(self, look: Callable[[], Found | None], every: float = WAIT_SECONDS) -> Found:
        while True:
            found = look()
            if found:
                return found
            self._pause(every)

    def _pause(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise _Ended


class _Ended(Exception):
    """The run has ended; there are no workers left to kill."""


def worker_pids() -> list[int]:
    """Return the sorted pids of ranks on this machine."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                parent = _stat(Path("/proc", entry))[1]
                if _name(entry).startswith(WORKER_NAME) and _name(parent) == SERVER_NAME:
                    pids.append(int(entry))
    return sorted(pids)


def _name(pid: str) -> str:
    return Path("/proc", pid, "comm").read_text().rstrip()


def _holds_lock(pid: int, folder: Path) -> bool:
    """Return True if a process has a lock file of `folder` open.

    One worker of a node compiles its graphs, so no other process waits with the lock open.
    """
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith(f"{folder}/") and target.endswith(".lock"):
                    return True
    return False


@contextmanager
def _stopped(workers: Sequence[int]) -> Iterator[None]:
    """Stop workers within the context; the surviving ones continue afterwards."""
    for pid in workers:
        _signal(pid, signal.SIGSTOP)
    for pid in workers:
        _await_stop(pid)
    try:
        yield
    finally:
        for pid in workers:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _await_stop(pid: int) -> None:
    """Return once all threads of a process are stopped or the process is gone."""
    tasks = Path(f"/proc/{pid}/task")
    with suppress(FileNotFoundError, ProcessLookupError):
        while any(_state(tasks / task) not in "TtZX" for task in os.listdir(tasks)):
            time.sleep(0.0002)


def _await_end(pid: int) -> None:
    with suppress(FileNotFoundError, ProcessLookupError):
        while _state(Path(f"/proc/{pid}")) not in "ZX":
            time.sleep(0.0002)


def _state(process: Path) -> str:
    return _stat(process)[0]


def _stat(process: Path) -> list[str]:
    """Return the fields after the name in a /proc stat file: state, parent pid, ..."""
    return (process / "stat").read_text().rpartition(")")[2].split()
