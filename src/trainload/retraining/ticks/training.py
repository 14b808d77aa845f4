"""The run of a tick: launched, or gone on with, and stopped where the tick has to stop."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainload.core.errors import RequestError
from trainload.core.storage.lease import LeaseLostError
from trainload.retraining.config.config import KEYS_ELSEWHERE, Config
from trainload.retraining.data.snapshot import evaluation_source, train_source
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.ticks.tick import Say, Trail

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event
    from trainload.launching.run.result import RunResult
    from trainload.launching.settings.parse import GivenSettings
    from trainload.packaging.package import Package
    from trainload.sharding.plans.plan import Plan

_WATCH_SECONDS = 0.5


class TickRun:
    """The training of a tick: a run in a folder of the tick, gone on with where there is one that nobody drives.

    Args:
        trail: the tick.
        snapshot: its data.
        package: what is trained.
        plan: how.
        options: what the run is given of how packages are opened.
        say: told what is done.
        on_event: told what happens in the run.

    Attributes:
        folder: the run's.
        first_step: when its first step had ended, as `time.monotonic` has it; None: it has not.
    """

    def __init__(
        self,
        trail: Trail,
        snapshot: Snapshot,
        package: Package,
        plan: Plan,
        options: dict[str, Any],
        say: Say,
        on_event: Callable[[Event], None],
    ) -> None:
        self._trail, self._snapshot, self._package, self._plan, self._options = trail, snapshot, package, plan, options
        self._say, self._on_event = say, on_event
        self._settings = settings_of(trail.config)
        self.folder = self._place()
        self.first_step: float | None = None

    def _place(self) -> Path:
        """The first of the tick's folders for runs that has no run, or one that nobody else drives.

        Whoever drives it has lost the lease, and ends: that is waited for, as long as it takes to know it of a process elsewhere.
        """
        from trainload.launching.run.run_spec import RUN_FILE
        from trainload.launching.run.run_state import FRESH_SECONDS, read_state

        number, until = 1, time.monotonic() + FRESH_SECONDS + 1
        while True:
            folder = folder_of(self._trail) / f"run-{number}"
            state = read_state(folder)
            if not (folder / RUN_FILE).exists() or state is None or not state.of_another:
                return folder
            if time.monotonic() > until:
                number += 1
            else:
                time.sleep(_WATCH_SECONDS)

    def result(self, optimizer_from: str | None) -> RunResult:
        """Trains, or goes on with it. optimizer_from: the run whose optimizer's state it begins with.

        Raises:
            LeaseLostError: on Ray, at the first event in the run after the lease was lost. The run is left as it is.
            TrainloadError: as `trainload.launch` and `resume`.
        """
        with _stopped_for(self._trail, self.folder):
            return self._result(optimizer_from)

    def _result(self, optimizer_from: str | None) -> RunResult:
        from trainload.launching.api.launch import launch, resume
        from trainload.launching.run.run_spec import RUN_FILE

        config = self._trail.config
        place: dict[str, Any] = {"backend": config.cluster.backend, "address": config.cluster.address}
        if (self.folder / RUN_FILE).exists():
            self._say(f"tick {self._trail.name}: continuing with {self.folder}")
            return resume(self.folder, on_event=self._heard, policy=self._options["policy"], **place)
        folder = folder_of(self._trail)
        return launch(
            self._package,
            self._plan,
            train_source(config, self._snapshot, folder),
            on_event=self._heard,
            run_dir=self.folder,
            steps=self._steps(),
            eval_data=evaluation_source(config, self._snapshot, folder),
            eval_batches=config.evaluation.batches,
            checkpoint_every=config.train.checkpoint_every,
            output=self.folder.with_name(f"{self.folder.name}.tl"),
            compile=config.cluster.compile,
            overrides=self._settings.overrides,
            optimizer_from=optimizer_from,
            **place,
            **self._options,
            **self._settings.run,
        )

    def _steps(self) -> int | None:
        train = self._trail.config.train
        if train.epochs is None:
            return train.steps
        return max(1, math.ceil(train.epochs * self._snapshot.rows / self._plan.global_batch))

    def _heard(self, event: Event) -> None:
        if self._trail.config.cluster.backend == "ray":  # there the driver itself asks; a run in this process ends as it would have
            self._trail.held.check()  # without it another process may have resumed this run and be writing to its folder
        if event.kind == "step" and self.first_step is None:
            self.first_step = time.monotonic()
        self._on_event(event)


def settings_of(config: Config) -> GivenSettings:
    """Return the settings in `train.set`.

    Raises:
        RequestError: a setting is unknown, not valid, or has a key of its own.
    """
    from trainload.launching.settings.parse import parse_settings

    if taken := next((name for name in KEYS_ELSEWHERE if name in config.train.settings), None):
        raise RequestError("this setting has its own key", where=f"train.set.{taken}", expected=KEYS_ELSEWHERE[taken])
    try:
        return parse_settings(config.train.given)
    except RequestError as error:
        raise RequestError("a setting is not allowed", where="train.set", got=str(error).removeprefix("--set ")) from error


def training_plan(config: Config, package: Package) -> Plan:
    """The plan by which a retraining trains a package.

    Raises:
        RequestError: a setting is not allowed.
        JobError: a setting cannot be changed of this package.
        PlanError: no plan of these settings fits it.
    """
    settings = settings_of(config)
    return plan_of(config, settings.overrides.apply(package, config.train.steps), settings.batch)


def plan_of(config: Config, package: Package, batch: Mapping[str, Any]) -> Plan:
    """The plan for a package on the retraining's cluster."""
    from trainload.sharding.planner.make_plan import plan
    from trainload.sharding.plans.plan import Cluster, read_plan

    cluster = config.cluster
    if cluster.plan is not None:
        if batch:
            raise RequestError(
                "the plan already sets this",
                where="train.set",
                got=" and ".join(sorted(batch)),
                hint="Omit it, or omit the key cluster.plan.",
            )
        return read_plan(Path(cluster.plan)).model_copy(update={"package": package.digest})
    shape = {"nodes": cluster.nodes, "devices_per_node": cluster.workers, "device": cluster.device}
    return plan(package, Cluster.model_validate(shape), cluster.strategy, **batch)


def folder_of(trail: Trail) -> Path:
    """Where a tick keeps its runs, and data that was made for it."""
    return Path(trail.config.runs) / trail.line / trail.name


@contextmanager
def _stopped_for(trail: Trail, run_dir: Path) -> Iterator[None]:
    """Within it a run is asked to stop, with a checkpoint, when the tick is."""
    from trainload.launching.run.contact import Request

    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_SECONDS):
            if trail.held.asked_to_stop is None or not run_dir.is_dir():
                continue
            with suppress(LeaseLostError, OSError):  # a run of somebody else's by now is not asked
                trail.held.check()
                (run_dir / Request.STOP.file).touch()

    thread = threading.Thread(target=watch, name="retraining", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
