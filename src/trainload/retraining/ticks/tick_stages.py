"""The stages of a tick: inspect the data, train and publish a challenger, compare it with the
champion, decide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainload.core.errors import ConflictError, RequestError, StorageError, TrainloadError
from trainload.packaging.stores.releases import Release, shown
from trainload.packaging.stores.store import NOBODY, Store
from trainload.retraining.config.config import Config
from trainload.retraining.data.drift import drift_of
from trainload.retraining.data.row_selection import judged_slices
from trainload.retraining.data.snapshot import (
    check_evaluable,
    check_unchanged,
    evaluation_source,
    take,
)
from trainload.retraining.data.snapshot_records import Snapshot
from trainload.retraining.ticks import aftermath
from trainload.retraining.ticks.announcements import announce
from trainload.retraining.ticks.checks import check_known_names
from trainload.retraining.ticks.gate import Verdict, decide
from trainload.retraining.ticks.lineage import TICK
from trainload.retraining.ticks.tick import Say, TickContext
from trainload.retraining.ticks.tick_records import Ended, Evaluated, Scores, Taken, Ticks, Trained
from trainload.retraining.ticks.training import (
    TickRun,
    place_of,
    plan_of,
    settings_of,
    training_plan,
)

if TYPE_CHECKING:
    from trainload.launching.run.journal import Event
    from trainload.packaging.libraries.op_libraries import Libraries
    from trainload.packaging.package import Package
    from trainload.sharding.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Opening:
    """Options for opening packages, as for `trainload.open` and `trainload.launch`."""

    libraries: Libraries = field(default_factory=lambda: MappingProxyType({}))
    trust_extensions: bool = False
    policy: Path | None = None


class Stages:
    """The implementation of `Work`.

    Args:
        opening: options for opening packages.
        say: called with progress messages.
        on_event: called with the events of runs.
    """

    def __init__(
        self, opening: Opening, say: Say, on_event: Callable[[Event], None] = lambda _event: None
    ) -> None:
        self._opening, self._say, self._on_event = opening, say, on_event
        self._planned: tuple[Any, Plan] | None = None

    def first(self, config: Config, store: Store) -> None:
        """Publish the configured package if the line has no current release (see `Work.first`)."""
        self._planned = None  # the plan's file may have changed since the last tick
        if store.current(config.line) is not None:
            return
        if config.package is None:
            raise RequestError(
                "the line has no current release",
                where=f"{store.url}, line {config.line}",
                hint="Set the key `package` to the package that the line starts with.",
            )
        from trainload.launching.node.fetching import here
        from trainload.packaging.stores.push import push

        self._say(f"line {config.line} has no release: publishing {config.package}")
        _, path = here(config.package)
        with suppress(ConflictError):  # another process was first
            push(
                path,
                config.store,
                line=config.line,
                only_if=NOBODY,
                message="the first of the line",
            )

    def check_fitting(self, config: Config, release: str) -> None:
        """Check the names in expressions, and the plan, for a release.

        The errors are those of `checks.check_known_names` and `training.training_plan`.
        """
        package = self._release(config, release)
        check_known_names(config, package)
        self._plan(config, package)

    def snapshot(self, trail: TickContext) -> Snapshot:
        """Take the snapshot of the tick's data (see `Work.snapshot`)."""
        package = self._release(trail.config, trail.pinned.parent)
        ticks = _ticks(trail)
        used_files = files_had(ticks, before=trail.name, since=trail.config.data.window.since)
        return take(trail.config, trail.scheduled, package, used_files, place_of(trail).folder)

    def train(self, trail: TickContext, snapshot: Snapshot) -> dict[str, Any]:
        """Train and publish the challenger (see `Work.train`)."""
        from trainload.launching.node.fetching import here
        from trainload.packaging.stores.push import push

        check_unchanged(snapshot)
        config, seconds = trail.config, {}
        release = (
            trail.pinned.parent if config.train.start == "current" else self._first_release(trail)
        )
        package = self._release(config, release)
        plan = self._plan(config, package)
        run = TickRun(trail, snapshot, package, plan, self._run_options, self._say, self._on_event)
        result = run.result(self._optimizer_from(trail))
        assert result.output is not None, "a challenger is the run's output"
        began = time.monotonic()
        report = push(
            here(result.output)[1],
            config.store,
            line=config.line,
            promote=False,
            message=f"tick {trail.name}",
            facts={
                TICK: trail.name,
                "steps": result.steps,
                "rows": snapshot.rows,
                "train.loss": result.last_loss,
            },
        )
        seconds = {**result.seconds, "publishing": round(time.monotonic() - began, 3)}
        if run.first_step is not None:
            seconds["first step"] = round(run.first_step - trail.began, 3)
        return {
            "release": trail.store.release(config.line, report.release).id,
            "package": report.digest,
            "run_dir": str(run.place),
            "checkpoint": str(result.checkpoint),
            "steps": result.steps,
            "first_loss": result.first_loss,
            "last_loss": result.last_loss,
            "rows": snapshot.rows,
            "plan": {
                "strategy": plan.strategy,
                "ranks": plan.world_size,
                "global_batch": plan.global_batch,
            },
            "seconds": seconds,
            "sent_bytes": report.sent_bytes,
            "restarts": result.restarts,
        }

    def evaluate(
        self, trail: TickContext, snapshot: Snapshot, trained: Trained
    ) -> tuple[Scores, Scores]:
        """Return the scores of champion and challenger (see `Work.evaluate`).

        The run itself has evaluated both if it started from the champion's weights; its results are
        used if its folder still exists.
        """
        by_step = _evaluated_by_run(trained.run_dir)
        challenger = by_step.get(trained.steps) or self._evaluate(trail, snapshot, trained.release)
        champion = by_step.get(0) if trail.config.train.start == "current" else None
        return champion or self._evaluate(trail, snapshot, trail.pinned.parent), challenger

    def decide(
        self, trail: TickContext, snapshot: Snapshot, trained: Trained, evaluated: Evaluated
    ) -> tuple[Verdict, dict[str, float]]:
        """Apply the gate to the scores (see `Work.decide`)."""
        gate, slices = trail.config.gate, trail.config.evaluation.slices
        drift = self._drift(trail, snapshot)
        columns = dict.fromkeys(snapshot.statistics, 0.0) | drift
        values = {
            **_prefix_names("eval", evaluated.challenger),
            **_prefix_names("champion.eval", evaluated.champion),
            "eval.steps": float(trained.steps),
            "train.loss": trained.last_loss,
            "data.rows": float(snapshot.rows),
            "drift.greatest": max(drift.values(), default=0.0),
            **{f"drift.{name}": value for name, value in columns.items()},
        }
        by_slice = {
            name: {
                **values,
                **_prefix_names("eval", scores),
                **_prefix_names("champion.eval", evaluated.champion.slices[name]),
                "slice.rows": float(scores.rows),
            }
            for name, scores in evaluated.challenger.slices.items()
            if name in evaluated.champion.slices
        }
        by_slice = {
            name: by_slice.get(name, {"slice.rows": 0.0})
            for name in judged_slices(trail.config, by_slice.keys() | snapshot.slices)
        }
        verdict = decide(
            gate.require,
            values,
            slices_require=None if slices is None else slices.require,
            slices=by_slice,
            slice_least_rows=1 if slices is None else slices.least_rows,
            drift=drift,
            drift_warn=gate.drift.warn,
            drift_bar=gate.drift.bar,
        )
        return verdict, drift

    def after(self, trail: TickContext, ended: Ended) -> tuple[str, ...]:
        """Hand over, clean up, notify and announce (see `Work.after`)."""
        config = trail.config
        wrong: list[str] = []
        steps: list[Callable[[], object]] = []
        if config.handover is not None:
            steps.append(
                lambda: self.hand_over(
                    config, aftermath.record_of(ended), promoted=ended.outcome == "promoted"
                )
            )
        needed = () if config.train.start == "current" else (self._first_release(trail),)
        steps.append(
            lambda: aftermath.clean_up(
                config, _ticks(trail).names(), self._tick_of_kept_run(trail, ended), needed
            )
        )
        if config.notify is not None and ended.outcome in config.notify.outcomes:
            hook = config.notify
            steps.append(lambda: aftermath.tell(hook.command, told(), hook.timeout))

        def told() -> dict[str, Any]:
            return aftermath.record_of(
                ended.model_copy(update={"warnings": (*ended.warnings, *wrong)})
            )

        for step in steps:
            try:
                step()
            except TrainloadError as error:
                wrong.append(aftermath.in_words(error))
        if config.mlflow is not None or config.webhooks:
            told_of = ended.model_copy(update={"warnings": (*ended.warnings, *wrong)})
            wrong += announce(config, trail.store, ended=told_of)
        return tuple(wrong)

    def hand_over(
        self, config: Config, record: Mapping[str, Any], *, promoted: bool = True
    ) -> str | None:
        """Hand the current release over to serving.

        Args:
            config: configuration of the retraining, which has a handover.
            record: record that its command receives.
            promoted: True to hand it over in any case; False only if another release is handed over
                now, as after a rollback.

        Returns:
            The release; None if there was nothing to do.
        """
        handover, pointer = config.handover, Store(config.store).current(config.line)
        assert handover is not None, "there is a place to hand over to"
        if pointer is None:
            return None
        name = aftermath.name_at(handover, config.line, pointer.release)
        if not promoted and aftermath.handed_over(handover) in (None, name):
            return None
        aftermath.hand_over(handover, self._release(config, pointer.release), name, record)
        return pointer.release

    # Packages

    def _release(self, config: Config, release: str) -> Package:
        """Open a release's package from this machine's cache."""
        return self.open(f"{config.store}#{config.line}/{shown(release)}")

    def _plan(self, config: Config, package: Package) -> Plan:
        """Return the plan for a package.

        A tick needs it before it begins and when it trains, so the last plan is cached.
        """
        key = (package.digest, config.cluster, config.train)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, training_plan(config, package)
        return self._planned[1]

    def open(self, reference: str) -> Package:
        """Open a package after the policies accept it."""
        from trainload.launching.node.fetching import here
        from trainload.launching.node.libraries import open_for_run
        from trainload.packaging.signatures.policy import find_policies

        source, path = here(reference)
        policies = find_policies(self._opening.policy)
        opened = open_for_run(
            path,
            self._opening.libraries,
            policies,
            None,
            trust_extensions=self._opening.trust_extensions,
        )
        return replace(opened, source=source)

    def _first_release(self, trail: TickContext) -> str:
        """Return the first release of the line with the parent's program."""
        store = trail.store
        program = store.release(trail.line, shown(trail.pinned.parent)).program
        for each in store.release_ids(trail.line):
            if store.release(trail.line, shown(each)).program == program:
                return each
        raise AssertionError("the parent is a release of its own program")

    def _creating_tick(self, trail: TickContext, release: str) -> str | None:
        """Return the tick that created a release; None if no tick did."""
        record: Release = trail.store.release(trail.line, shown(release))
        tick = record.facts.get(TICK)
        return tick if isinstance(tick, str) else None

    def _optimizer_from(self, trail: TickContext) -> str | None:
        """Return the folder of the run that created the parent, whose optimizer state is kept; None
        for a fresh optimizer.
        """
        from trainload.launching.run.working_copy import has_run

        if trail.config.train.optimizer == "fresh":
            return None
        tick = self._creating_tick(trail, trail.pinned.parent)
        trained = None if tick is None else _ticks(trail).read(Trained, tick)
        if trained is None:  # the first release was not created by a run
            return None
        if not has_run(trained.run_dir):
            raise StorageError(
                "the run that produced the current release no longer exists, and neither does its"
                " optimizer state",
                where=f"{trail.config.line}, release {shown(trail.pinned.parent)}",
                expected=trained.run_dir,
                hint="Restore the folder, or start with a fresh optimizer: train.optimizer: fresh.",
            )
        return trained.run_dir

    def _tick_of_kept_run(self, trail: TickContext, ended: Ended) -> str | None:
        """Return the tick whose run's folder must be kept."""
        return (
            trail.name
            if ended.outcome == "promoted"
            else self._creating_tick(trail, trail.pinned.parent)
        )

    def _drift(self, trail: TickContext, snapshot: Snapshot) -> dict[str, float]:
        """Return the drift of each column from the data of the champion; {} if that data is
        unknown.
        """
        tick = self._creating_tick(trail, trail.pinned.parent)
        before = None if tick is None else _ticks(trail).read(Taken, tick)
        return {} if before is None else drift_of(before.snapshot.statistics, snapshot.statistics)

    def _evaluate(self, trail: TickContext, snapshot: Snapshot, release: str) -> Scores:
        from trainload.launching.api.evaluate import evaluate
        from trainload.launching.settings.overrides import Overrides

        package = self._release(trail.config, release)
        cluster, settings = trail.config.cluster, settings_of(trail.config)
        # Champion and challenger must be scored in the same precision, the one in which runs of
        # this retraining evaluate.
        overrides = Overrides(precision=settings.overrides.precision)
        place = place_of(trail)
        check_evaluable(trail.config, snapshot, place.folder)
        source = place.shared(evaluation_source(trail.config, snapshot, place.folder))
        self._say(f"tick {trail.name}: evaluating release {shown(release)}")
        result = evaluate(
            package,
            plan_of(trail.config, overrides.apply(package, None), settings.batch),
            source,
            overrides=overrides,
            backend=cluster.backend,
            address=cluster.address,
            compile=cluster.compile,
            eval_batches=trail.config.evaluation.batches,
            run_dir=place.run(f"evaluation-{shown(release)}-{shown(trail.held.id)}"),
            **self._run_options,
        )
        return scores(result.loss, result.metrics, result.parts, result.rows)

    @property
    def _run_options(self) -> dict[str, Any]:
        """Options for opening packages, as keyword arguments of runs."""
        opening = self._opening
        return {
            "libraries": opening.libraries,
            "trust_extensions": opening.trust_extensions,
            "policy": opening.policy,
        }


def files_had(ticks: Ticks, before: str, since: str) -> set[tuple[str, str]]:
    """Return names and identities of the files of earlier ticks: those of ticks that judged a
    challenger, and bad files.

    Args:
        ticks: ticks of the line.
        before: only ticks before this one count.
        since: with "promoted", good files count only if the tick's challenger was promoted.
    """
    names = [name for name in ticks.names() if name < before]
    ended = ticks.of_all(Ended, names)
    judged = {"promoted"} if since == "promoted" else {"promoted", "rejected", "conflict"}
    used_files: set[tuple[str, str]] = set()
    for tick, taken in ticks.of_all(Taken, list(ended)).items():
        counts = ended[tick].outcome in judged
        used_files |= {
            (file.name, file.identity) for file in taken.snapshot.files if counts or file.problem
        }
    return used_files


def scores(
    loss: float, metrics: Mapping[str, float], parts: Mapping[str, Any], rows: int
) -> Scores:
    """Return the scores of an evaluation.

    `parts` has the results by name of each part of the held-out data.
    """
    slices = {
        name: Scores(
            loss=_finite(part["loss"]),
            metrics=_all_finite(part["metrics"]),
            rows=part["rows"],
            slices={},
        )
        for name, part in parts.items()
    }
    return Scores(loss=_finite(loss), metrics=_all_finite(metrics), rows=rows, slices=slices)


def _evaluated_by_run(run: str) -> dict[int, Scores]:
    """Return step -> scores of the evaluations of a run in a folder or at a URL; {} if it does not
    exist any more.
    """
    from trainload.launching.run.journal import stream_events
    from trainload.launching.run.working_copy import viewed

    by_step = {}
    with viewed(run) as files:
        for event in stream_events(files.folder):
            if event.kind == "eval":
                data = event.data
                by_step[int(data["step"])] = scores(
                    data["loss"], data["metrics"], data.get("parts", {}), int(data.get("rows", 0))
                )
    return by_step


def _prefix_names(prefix: str, evaluated: Scores) -> dict[str, float]:
    return {
        f"{prefix}.{name}": math.nan if value is None else value
        for name, value in evaluated.values.items()
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _all_finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in values.items()}


def _ticks(trail: TickContext) -> Ticks:
    return Ticks(trail.store, trail.line)
