"""The training run of a tick: launch or resume it, and stop it when the tick has to stop."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainload.core.errors import RequestError, StorageError, first_line
from trainload.core.logs import logged_suppress
from trainload.core.storage.places import Where
from trainload.retraining.config.config import KEYS_ELSEWHERE, Config
from trainload.retraining.data.snapshot import evaluation_source, train_source
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.data.tick_place import TickPlace
from trainload.retraining.ticks.tick import Say, TickContext

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event
    from trainload.launching.run.result import RunResult
    from trainload.launching.settings.parse import GivenSettings
    from trainload.packaging.package import Package
    from trainload.sharding.plans.plan import Plan

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5


class TickRun:
    """The training run of a tick, below the tick's place. An existing run without a driver is
    resumed.

    Args:
        trail: context of the tick.
        snapshot: data of the tick.
        package: package that is trained.
        plan: plan of the run.
        options: the run's options for opening packages.
        say: called with progress messages.
        on_event: called with the events of the run.

    Attributes:
        place: folder or URL of the run.
        first_step: end of its first step by `time.monotonic`; None before.
    """

    def __init__(
        self,
        trail: TickContext,
        snapshot: Snapshot,
        package: Package,
        plan: Plan,
        options: dict[str, Any],
        say: Say,
        on_event: Callable[[Event], None],
    ) -> None:
        self._trail, self._snapshot, self._package, self._plan, self._options = (
            trail,
            snapshot,
            package,
            plan,
            options,
        )
        self._say, self._on_event = say, on_event
        self._settings = settings_of(trail.config)
        self._tick_place = place_of(trail)
        self.place = self._first_free()
        self.first_step: float | None = None

    def _first_free(self) -> Where:
        """Return the first of the tick's places of runs without a run, or whose run has no other
        driver.

        Another driver has lost the lease and will end, so this waits as long as it takes to notice
        the end of a process on another machine.
        """
        from trainload.launching.run.run_state import FRESH_SECONDS
        from trainload.launching.run.working_copy import has_run, state_at

        number, until = 1, time.monotonic() + FRESH_SECONDS + 1
        while True:
            place = self._tick_place.run(f"run-{number}")
            state = state_at(place)
            if not has_run(place) or state is None or not state.of_another:
                return place
            if time.monotonic() > until:
                number += 1
            else:
                time.sleep(_WATCH_SECONDS)

    def result(self, optimizer_from: str | None) -> RunResult:
        """Launch or resume the run, and return its result. `optimizer_from` is the run with the
        initial optimizer state.

        Raises:
            LeaseLostError: on Ray, at the first event of the run after the lease was lost. The run
                is not changed.
            TrainloadError: as for `trainload.launch` and `trainload.resume`.
        """
        with _forward_stop_requests(self._trail, self.place):
            return self._result(optimizer_from)

    def _result(self, optimizer_from: str | None) -> RunResult:
        from trainload.launching.api.launch import launch, prepare
        from trainload.launching.run.working_copy import has_run

        config, tick = self._trail.config, self._tick_place
        cluster: dict[str, Any] = {
            "backend": config.cluster.backend,
            "address": config.cluster.address,
        }
        if has_run(self.place):
            self._say(f"tick {self._trail.name}: continuing with {self.place}")
            return self._resume(cluster)
        run = self._package, self._plan
        data = tick.shared(train_source(config, self._snapshot, tick.folder))
        options: dict[str, Any] = {
            "on_event": self._handle_event,
            "run_dir": self.place,
            "steps": self._steps(),
            "eval_data": tick.shared(evaluation_source(config, self._snapshot, tick.folder)),
            "eval_batches": config.evaluation.batches,
            "checkpoint_every": config.train.checkpoint_every,
            "output": f"{self.place}.tl",
            "compile": config.cluster.compile,
            "overrides": self._settings.overrides,
            "optimizer_from": optimizer_from,
            **cluster,
            **self._options,
            **self._settings.run,
        }
        try:
            return launch(*run, data, **options)
        except StorageError as error:
            if not self._settings.run.get("sinks") or has_run(self.place):
                raise
            # A launch is rejected if a tracker refuses it, a resumed run is not: no tick may depend
            # on one. If something else is wrong, this raises the same error.
            prepare(*run, data, **options)
            self._say(f"tick {self._trail.name}: {first_line(error)}")
            return self._resume(cluster)

    def _resume(self, cluster: dict[str, Any]) -> RunResult:
        from trainload.launching.api.launch import resume

        policy = self._options["policy"]
        return resume(self.place, on_event=self._handle_event, policy=policy, **cluster)

    def _steps(self) -> int | None:
        train = self._trail.config.train
        if train.epochs is None:
            return train.steps
        return max(1, math.ceil(train.epochs * self._snapshot.rows / self._plan.global_batch))

    def _handle_event(self, event: Event) -> None:
        # only on Ray this is called by the driver; a run in this process just ends
        if self._trail.config.cluster.backend == "ray":
            # otherwise another process may have resumed this run, and write to its folder
            self._trail.held.check()
        if event.kind == "step" and self.first_step is None:
            self.first_step = time.monotonic()
        self._on_event(event)


def settings_of(config: Config) -> GivenSettings:
    """Return the settings in `train.set`.

    Raises:
        RequestError: a setting is unknown or invalid, or has its own key in the file.
    """
    from trainload.launching.settings.parse import parse_settings

    if misplaced := next((name for name in KEYS_ELSEWHERE if name in config.train.settings), None):
        raise RequestError(
            "this setting has its own key",
            where=f"train.set.{misplaced}",
            expected=KEYS_ELSEWHERE[misplaced],
        )
    try:
        return parse_settings(config.train.given)
    except RequestError as error:
        raise RequestError(
            "a setting is not allowed", where="train.set", got=str(error).removeprefix("--set ")
        ) from error


def training_plan(config: Config, package: Package) -> Plan:
    """Return the plan by which a retraining trains a package.

    Raises:
        RequestError: a setting is not allowed.
        JobError: a setting cannot be changed for this package.
        PlanError: no plan with these settings fits it.
    """
    settings = settings_of(config)
    return plan_of(config, settings.overrides.apply(package, config.train.steps), settings.batch)


def plan_of(config: Config, package: Package, batch: Mapping[str, Any]) -> Plan:
    """Return the plan for a package on the retraining's cluster."""
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


def place_of(trail: TickContext) -> TickPlace:
    """Return the place of a tick's runs and of the data that is written for it."""
    return TickPlace.of(trail.config.runs, trail.line, trail.name)


@contextmanager
def _forward_stop_requests(trail: TickContext, place: Where) -> Iterator[None]:
    """Forward a request to stop the tick to its run within the context; the run stops with a
    checkpoint.
    """
    from trainload.launching.run.contact import Request
    from trainload.launching.run.working_copy import has_run, request

    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_SECONDS):
            if trail.held.asked_to_stop is None:
                continue
            # after losing the lease, the run may be another process's
            message = "a request to stop was not passed to the run"
            with logged_suppress(_log, message, StorageError, OSError):
                trail.held.check()
                if has_run(place):
                    request(place, Request.STOP)

    thread = threading.Thread(target=watch, name="retraining", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
