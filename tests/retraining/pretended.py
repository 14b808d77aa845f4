"""Ticks with simulated training in real stores, and processes that die at a write."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.places import retrained

from trainload.core.errors import DivergedError, StorageError
from trainload.core.storage import lease
from trainload.core.storage.folder_files import FolderFiles
from trainload.packaging.package import Package
from trainload.packaging.stores.push import push
from trainload.packaging.stores.releases import shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config, checked
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.ticks.gate import Verdict, decide
from trainload.retraining.ticks.tick import Scheduler, TickContext
from trainload.retraining.ticks.tick_records import Ended, Evaluated, Scores, Trained

LINE = "main"
FIRST = datetime(2026, 1, 1, 3, tzinfo=UTC)
WRITES = ("create", "replace", "send", "delete")


def at(number: int) -> datetime:
    """Return the time of the n-th tick (0-based)."""
    return FIRST + timedelta(days=number)


def config_of(store: Path, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "store": str(store),
        "line": LINE,
        "data": {"files": "data/*.parquet"},
        "evaluation": {"hold_out": 0.1},
        "lease": {"seconds": "60s"},
        "gate": {"require": "eval.loss < champion.eval.loss"},
        "runs": str(store.parent / "runs"),
    }
    return checked({**given, **changes}, "the test")


@dataclass
class Pretended:
    """`Work` that trains by adding to a weight.

    The name of a tick determines its result: ticks in `empty`, `bad` and `diverging` have no new
    data, bad data, or a loss that is NaN; those in `worse` have a challenger that is worse than the
    champion.
    """

    package: Package
    folder: Path
    empty: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)
    diverging: set[str] = field(default_factory=set)
    worse: set[str] = field(default_factory=set)
    fail: Callable[[str], None] = lambda _stage: None
    told: list[tuple[str, str]] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def first(self, config: Config, store: Store) -> None:
        if store.current(config.line) is None:
            push(self.package.path, config.store, line=config.line, message="the first")

    def check_fitting(self, config: Config, release: str) -> None:
        pass

    def snapshot(self, trail: TickContext) -> Snapshot:
        self.fail("snapshot")
        return made_snapshot(
            empty="no new data: no file" if trail.name in self.empty else "",
            refused="a.parquet: a NaN" if trail.name in self.bad else "",
        )

    def train(self, trail: TickContext, snapshot: Snapshot) -> dict[str, Any]:
        self.fail("train")
        if trail.name in self.diverging:
            raise DivergedError("the loss is nan", where="step 3")
        path = self.folder / f"{trail.name}-{next(self._numbers)}.tl"
        seed = int(trail.name[4:8])  # the same in every process that trains
        retrained(self.package, path, "lin.weight", by=1.0 + seed)
        report = push(
            path, trail.config.store, line=trail.line, promote=False, facts={"tick": trail.name}
        )
        self.trained.append(trail.name)
        return {
            "release": f"{int(report.release):08d}",
            "package": report.digest,
            "run_dir": "gone",
            "checkpoint": "gone",
            "steps": 5,
            "first_loss": 2.0,
            "last_loss": 1.0,
            "rows": snapshot.rows,
            "plan": {"strategy": "single", "ranks": 1},
            "seconds": {},
            "sent_bytes": report.sent_bytes,
            "restarts": 0,
        }

    def evaluate(
        self, trail: TickContext, snapshot: Snapshot, trained: Trained
    ) -> tuple[Scores, Scores]:
        self.fail("evaluate")
        better = trail.name not in self.worse
        return _scores(1.0), _scores(0.9 if better else 1.1)

    def decide(
        self, trail: TickContext, snapshot: Snapshot, trained: Trained, evaluated: Evaluated
    ) -> tuple[Verdict, dict[str, float]]:
        self.fail("decide")
        champion, challenger = evaluated.champion.loss, evaluated.challenger.loss
        assert champion is not None
        assert challenger is not None
        values = {
            "eval.loss": challenger,
            "champion.eval.loss": champion,
            "train.loss": trained.last_loss,
        }
        return decide(trail.config.gate.require, values), {}

    def after(self, trail: TickContext, ended: Ended) -> tuple[str, ...]:
        self.fail("after")
        self.told.append((trail.name, ended.outcome))
        return ()


def _scores(loss: float) -> Scores:
    return Scores(loss=loss, metrics={}, rows=10, slices={})


def made_snapshot(*, empty: str = "", refused: str = "") -> Snapshot:
    return Snapshot(
        files=(),
        held_out=(),
        rows=100,
        held_out_rows=10,
        slices={},
        statistics={},
        made=False,
        empty=empty,
        refused=refused,
    )


class DeadError(StorageError):
    """The process that makes the request was killed earlier."""


class Writes:
    """Counter of writes to folder stores that can simulate the death of a process at a write.

    Attributes:
        count: number of writes so far.
        die_at: number of the write at which the process dies; None: it does not die.
        after: True to die after the write, False to die before it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.die_at: int | None = None
        self.after = False
        self.dead = False

    def arm(self, die_at: int | None, *, after: bool = False) -> None:
        """Start over as a new process that has written nothing."""
        self.count, self.die_at, self.after, self.dead = 0, die_at, after, False

    def _met(self, *, done: bool) -> None:
        if self.dead:
            raise DeadError("killed", where="the store")
        if not done:
            self.count += 1
        if self.die_at == self.count and done == self.after:
            self.dead = True
            raise DeadError("killed", where="the store")

    @contextmanager
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in WRITES:
                patch.setattr(FolderFiles, name, self._wrapped(getattr(FolderFiles, name)))
            patch.setattr(FolderFiles, "read", self._read(FolderFiles.read))
            # the machine survives, so writes need not be flushed
            patch.setattr(os, "fsync", lambda _file: None)
            # of two processes, the other one has always ended
            patch.setattr(lease, "has_ended", lambda _process: True)
            yield

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(files: FolderFiles, path: str, *arguments: Any) -> Any:
            if path.startswith(f"lines/{LINE}/heartbeats"):  # heartbeats are not deterministic
                if self.dead:
                    raise DeadError("killed", where="the store")
                return real(files, path, *arguments)
            self._met(done=False)
            result = real(files, path, *arguments)
            self._met(done=True)
            return result

        return write

    def _read(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(files: FolderFiles, path: str, limit: int) -> Any:
            if self.dead:
                raise DeadError("killed", where="the store")
            return real(files, path, limit)

        return read


def scheduler(
    config: Config, work: Pretended, said: list[str] | None = None, **more: Any
) -> Scheduler:
    return Scheduler(
        config, work, (said if said is not None else []).append, now=lambda: at(10_000), **more
    )


def summary(store: Store) -> dict[str, Any]:
    """Return the state of a line in a store, without times, random numbers and owners."""
    from trainload.retraining.ticks.tick_records import Ticks

    ticks = Ticks(store, LINE)
    return {
        "current": [
            shown(entry.release)
            for entry in store.history(LINE)
            if not entry.reason.startswith("lease ")
        ],
        "releases": [(state.release.package, state.status) for state in store.releases(LINE)],
        "ended": {
            name: (each.outcome, each.reason, each.release)
            for name, each in ticks.of_all(Ended).items()
        },
    }
