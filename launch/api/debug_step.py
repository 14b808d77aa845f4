"""Compute a step of a run or a package again, interpreted, and find its first bad value."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import RequestError
from trainload.core.storage.places import Where
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.load import load_sharded
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.data.prefetch import BatchStream, RankRows
from trainload.launching.data.run_data import RunData, open_run_data, run_dispatcher
from trainload.launching.debugging.bad_value import Finding
from trainload.launching.debugging.sighting import Sighting
from trainload.launching.debugging.statistics import Statistics, StatisticsCollector
from trainload.launching.debugging.tensor_facts import Level, TensorFacts, facts_of, level_of
from trainload.launching.debugging.value_watch import Watch
from trainload.launching.node.build_key import device_of
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.determinism import deterministic
from trainload.launching.run.journal import Event, stream_events
from trainload.launching.run.opening import trained_package
from trainload.launching.run.run_spec import RunSpec, read_spec
from trainload.launching.run.working_copy import viewed
from trainload.launching.worker.divergence import Search
from trainload.launching.worker.engine import Draw, Engine, NotFiniteError
from trainload.launching.worker.explaining import Failing, explain
from trainload.launching.worker.loop import SCALING
from trainload.launching.worker.row_bisection import causing_rows
from trainload.launching.worker.step_batches import draw_of, next_calls
from trainload.packaging.package import Package
from trainload.sharding.planner.make_plan import plan as make_plan
from trainload.sharding.plans.parameters_within import parameters_within
from trainload.sharding.plans.plan import Cluster, Plan


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of `debug`.

    Attributes:
        step: number of the step that was searched, from 1, as in messages.
        began: number of steps that the state had at the beginning: those of a checkpoint, or 0 for
            the weights that the run or the package begins from. The steps between were computed
            again.
        loss: loss of the step; None if the gradient was not finite.
        gradient_norm: norm of its gradient; None if the loss was not finite.
        finding: its first bad value; None if there is none.
        statistics: statistics of the step by module, if they were requested.
        seconds: duration.

    Example:
        found = trainload.debug("runs/x").finding
        if found is not None:
            print(found.what, found.where)
    """

    step: int
    began: int
    loss: float | None
    gradient_norm: float | None
    finding: Finding | None
    statistics: Statistics | None
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "step": self.step,
            "began": self.began,
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "finding": None if self.finding is None else self.finding.as_json(),
            "statistics": None if self.statistics is None else self.statistics.as_json(),
            "seconds": round(self.seconds, 3),
        }


@neutrally
def debug(
    source: str | Path | Package,
    *,
    data: str | Path | None = None,
    step: int | None = None,
    above: float | None = None,
    statistics: bool = False,
) -> Diagnosis:
    """Compute a step again, with one process and without compiled code, and find the first value
    that is not finite and reaches the loss, a gradient or a parameter.

    A run is computed from its newest checkpoint before the step, with the data, the microbatches
    and the random numbers of the run. Nothing is written.

    Args:
        source: folder or URL of a run, or a package.
        data: rows, for a package: path, URL or mixture, as for `launch`.
        step: number of the step, from 1. Default: the step at which the run failed, or its last
            one; the first step for a package. An earlier step whose loss or gradient is not finite
            ends the search.
        above: find the first value whose magnitude is above this number instead, wherever it leads.
        statistics: True to collect statistics of the step by module. They need a copy of the
            parameters.

    Raises:
        RequestError: the step does not exist, `above` is not a positive number, a package has no
            data, or a run has its own.
        TrainloadError: an error of the run, the package, the data or the checkpoints.

    Example:
        diagnosis = trainload.debug("runs/x", step=74)
        print(diagnosis.finding)
    """
    began = time.perf_counter()
    _check_arguments(source, data, step, above)
    limit = math.inf if above is None else above
    if isinstance(source, Package):
        assert data is not None, "it is checked"
        device = torch.device("cpu")
        plan = make_plan(source, Cluster(), "single")
        opened = open_run_data(data, source, plan.rows_per_call, default_cache_dir() / "data")
        with deterministic(True):
            replay = _Replay(source, plan, device, opened, str(data), limit, statistics)
            replay.engine.held.load_package()
            number = (step or 1) - 1
            diagnosis = replace(replay.searched(number, number), began=0)
    else:
        diagnosis = _debug_run(source, step, limit, statistics)
    return replace(diagnosis, seconds=time.perf_counter() - began)


def _check_arguments(
    source: str | Path | Package, data: object, step: int | None, above: float | None
) -> None:
    if isinstance(source, Package) and data is None:
        raise RequestError("a package needs data", where="data", hint="Pass --data.")
    if not isinstance(source, Package) and data is not None:
        raise RequestError("a run has its own data", where="data", hint="Omit --data.")
    if step is not None and step < 1:
        raise RequestError(
            "there is no such step", where="step", expected="1 or more", got=str(step)
        )
    if above is not None and not above > 0:
        raise RequestError(
            "it is not a limit", where="above", expected="a positive number", got=str(above)
        )


def _debug_run(run_dir: Where, step: int | None, above: float, statistics: bool) -> Diagnosis:
    with viewed(run_dir) as files:
        spec = read_spec(files.folder)
        wanted = _failed_step(stream_events(files.folder)) if step is None else step
        if not 1 <= wanted <= spec.steps:
            raise RequestError(
                "the run has no such step",
                where="step",
                expected=f"1 to {spec.steps}",
                got=str(wanted),
            )
        package = trained_package(spec)
        plan = _alone(package, spec.plan)
        cache = default_cache_dir() / "data"
        data = open_run_data(spec.data, package, plan.rows_per_call, cache)
        with deterministic(spec.deterministic):
            replay = _Replay(package, plan, device_of(plan), data, spec.data, above, statistics)
            start = _load_before(spec, replay.engine, plan, wanted - 1)
            return replay.searched(wanted - 1, start)


def _failed_step(events: Iterable[Event]) -> int:
    """Return the number, from 1, of the step at which a run failed, or of its last step."""
    last, before = 0, ""
    for event in events:
        if event.kind in ("step", "finding"):
            last = event.data["step"] + 1
        failed = event.kind == "failed" and event.data.get("error") == "DivergedError"
        if failed and before != "finding":
            last += 1
        before = event.kind
    return max(1, last)


def _alone(package: Package, plan: Plan) -> Plan:
    """Return a plan for one process that calls graphs with as many rows as another plan."""
    wanted = plan.cluster.device
    device = wanted if wanted != "cuda" or torch.cuda.is_available() else "cpu"
    return make_plan(
        package,
        Cluster(device=device),
        "single",
        global_batch=plan.global_batch,
        accumulate=plan.global_batch // plan.rows_per_call,
    )


def _load_before(spec: RunSpec, engine: Engine, plan: Plan, step: int) -> int:
    """Load the state of a run from its newest checkpoint with at most `step` steps, or else what it
    began from; return its number of steps.
    """
    published = place_of(spec.place, spec.checkpoints).published()
    for number in sorted((each for each in published if each <= step), reverse=True):
        checkpoint = Checkpoint.open(published[number])
        engine.held.load(load_sharded(checkpoint, plan, 0), checkpoint.index.user.get(SCALING))
        return number
    engine.held.load_package()
    if spec.optimizer_from is not None:
        before = Checkpoint.open(spec.optimizer_from)
        state = load_sharded(before, plan, 0, state_alone=True)
        engine.held.load_optimizer(state, before.index.user.get(SCALING))
    return 0


class _Replay:
    """A process that computes steps of a run, without its other processes."""

    def __init__(
        self,
        package: Package,
        plan: Plan,
        device: torch.device,
        data: RunData,
        source: str,
        above: float,
        statistics: bool,
    ) -> None:
        self._package, self._plan, self._data, self._above = package, plan, data, above
        self._collector = StatisticsCollector(plan) if statistics else None
        self._search = Search(package, plan, 0, device, data, source, None)
        self._built = self._search.build()
        self.engine = Engine(package, plan, 0, device, self._built)

    def searched(self, step: int, start: int) -> Diagnosis:
        """Compute the steps from `start` up to `step`, and search the last one, or the first whose
        loss or gradient is not finite.

        Args:
            step: number of the step, from 0.
            start: number of steps that the state has; the first one if there is no state of a run.
        """
        recipe = self._package.recipe
        rows = RankRows(recipe, self._data.order(recipe.seed), self._plan, 0)
        dispatcher = run_dispatcher(self._package)
        ahead = 2 * self._plan.accumulate
        with BatchStream(self._data, rows, start, step + 1, ahead=ahead) as stream:
            for number in range(start, step + 1):
                calls = next_calls(stream, recipe, number, self._plan.accumulate)
                draws = [draw_of(each, self._data, dispatcher) for each in calls]
                diagnosis = self._compute(number, draws, searches=number == step)
                if diagnosis is not None:
                    return replace(diagnosis, began=start)
        raise AssertionError("the last step is searched")

    def _compute(self, step: int, draws: Sequence[Draw], *, searches: bool) -> Diagnosis | None:
        collector = self._collector if searches else None
        watch = self._watch(collector)
        loss: float | None
        norm: float | None
        if collector is not None:
            collector.begin(self.engine.held.params)
        if searches:
            self.engine.built = watch.watched(self._built)
        try:
            with self._explaining(step):
                result = self.engine.step(step, draws)
        except NotFiniteError as error:
            if not searches:
                self.engine.repeat_turn(watch.watched(self._built))
            loss, norm = (error.value, None) if error.quantity == "loss" else (None, error.value)
            finding = self._search.finding(watch)
            if finding is not None:
                finding = self._with_rows(finding)
        else:
            if not searches:
                return None
            loss, norm = result.loss, result.gradient_norm
            finding = self._search.finding(watch) or self._bad_parameters()
        statistics = None
        if collector is not None:
            known = norm if len(self._package.recipe.graphs) < 2 else None
            statistics = collector.statistics(self.engine.held.params, known)
        return Diagnosis(step + 1, 0, loss, norm, finding, statistics, 0.0)

    @contextmanager
    def _explaining(self, step: int) -> Iterator[None]:
        """Replace an error of an operator by one that names its line and the row."""
        try:
            yield
        except NotFiniteError:
            raise
        except Exception as error:
            search = self._search
            failing = Failing(self._package, self._plan, 0, self.engine, search.device)
            when = f"step {step + 1}"
            explained = explain(error, failing, self._data, search.source, when)
            if explained is None or explained is error:
                raise
            raise explained from error

    def _watch(self, collector: StatisticsCollector | None = None) -> Watch:
        return self._search.watch(
            self.engine,
            above=self._above,
            everywhere=math.isfinite(self._above),
            statistics=collector,
        )

    def _bad_parameters(self) -> Finding | None:
        """Return the parameters that are bad after the step, in whose update no operator was found.

        The update that makes an optimizer's state is no graph.
        """
        bad: dict[str, TensorFacts] = {}
        for bucket in self._plan.buckets:
            value = self.engine.held.params[bucket.name]
            for name, low, high in parameters_within(self._plan, 0, bucket, len(value)):
                if level_of(value[low:high], self._above) is not Level.FINE:
                    bad[name] = facts_of(value[low:high], "result")
        if not bad:
            return None
        first = next(iter(bad.values()))
        sighting = Sighting(
            graph="update",
            call=0,
            position=0,
            operator=self._package.recipe.optimizer,
            module="",
            line="",
            part="update",
            level=Level.NAN if first.nans else Level.LARGE,
            result=first,
            inputs=(),
            rows=(),
            source="",
            from_peers=False,
        )
        return Finding(sighting, 0, tuple(bad))

    def _with_rows(self, finding: Finding) -> Finding:
        """Return a finding with the rows that cause it, if its value has no dim of rows."""
        found = finding.sighting
        if found.rows or found.part not in ("forward", "backward"):
            return finding

        def sightings(changed: Draw | None = None) -> Sequence[Sighting]:
            watch = self._watch()
            self.engine.repeat_turn(watch.watched(self._built), changed)
            return watch.sightings

        again = sightings()
        draw = self.engine.begun_draw
        if not again or again[0].operator != found.operator:
            return finding  # another graph of the round made it
        rows = causing_rows(draw, again[0].call, lambda changed: bool(sightings(changed)))
        microbatch = draw.microbatches[again[0].call]
        numbers, name = self._search.rows_of(microbatch, rows)
        return replace(finding, sighting=replace(found, rows=numbers, source=name))
