"""Compute a step of a run or a package again, interpreted, and find its first bad value."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import RequestError
from trainload.launching.api.replay import Replay, replaying
from trainload.launching.debugging.bad_value import Finding
from trainload.launching.debugging.sighting import Sighting
from trainload.launching.debugging.statistics import Statistics, joined
from trainload.launching.debugging.tensor_facts import Level, facts_of
from trainload.launching.debugging.value_watch import bad_parts
from trainload.launching.worker.engine import Draw, NotFiniteError
from trainload.launching.worker.step_statistics import StepStatistics
from trainload.packaging.package import Package


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
        found = trainload.debug("runs/first").finding
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
        statistics: True to collect statistics of the step by module.

    Raises:
        RequestError: the step does not exist, `above` is not a positive number, a package has no
            data, or a run has its own.
        TrainloadError: an error of the run, the package, the data or the checkpoints.

    Example:
        diagnosis = trainload.debug("runs/first", step=2)
        print(diagnosis.finding)
    """
    began = time.perf_counter()
    if above is not None and not above > 0:
        raise RequestError(
            "it is not a limit", where="above", expected="a positive number", got=str(above)
        )
    limit = math.inf if above is None else above
    with replaying(source, data, step) as (replay, start, number):
        diagnosis = _Searching(replay, limit, statistics).searched(number, start)
    return replace(diagnosis, began=start, seconds=time.perf_counter() - began)


class _Searching:
    """A search in the steps of a process."""

    def __init__(self, replay: Replay, above: float, statistics: bool) -> None:
        self._replay, self._above = replay, above
        self._search, self._engine, self._built = replay.search, replay.engine, replay.built
        self._collector = (
            StepStatistics(replay.search, replay.built, follows_units=True) if statistics else None
        )

    def searched(self, step: int, start: int) -> Diagnosis:
        """Compute the steps from `start` up to `step`, and search the last one, or the first whose
        loss or gradient is not finite.

        Args:
            step: number of the step, from 0.
            start: number of steps that the state has; the first one if there is no state of a run.
        """
        for number, draws in self._replay.batches(start, step + 1):
            diagnosis = self._compute(number, draws, searches=number == step)
            if diagnosis is not None:
                return diagnosis
        raise AssertionError("the last step is searched")

    def _compute(self, step: int, draws: Sequence[Draw], *, searches: bool) -> Diagnosis | None:
        collector = self._collector if searches else None
        search = self._search
        watch = search.watch(self._engine, above=self._above)
        loss: float | None
        norm: float | None
        if searches:
            self._engine.built = watch.watched(self._built)
        collecting = nullcontext() if collector is None else collector.collecting(self._engine)
        try:
            with self._replay.explaining(step), collecting:
                result = self._engine.step(step, draws)
        except NotFiniteError as error:
            if not searches:
                self._engine.repeat_turn(watch.watched(self._built))
            loss, norm = (error.value, None) if error.quantity == "loss" else (None, error.value)
            finding = search.finding(watch)
            if finding is not None:
                finding = search.with_rows(finding, self._engine, self._built, above=self._above)
        else:
            if not searches:
                return None
            loss, norm = result.loss, result.gradient_norm
            finding = search.finding(watch) or self._bad_parameters()
        statistics = None if collector is None else joined(collector.collected())
        return Diagnosis(step + 1, 0, loss, norm, finding, statistics, 0.0)

    def _bad_parameters(self) -> Finding | None:
        """Return the parameters that are bad after the step, in whose update no operator was found.

        The update that makes an optimizer's state is no graph.
        """
        plan, params = self._replay.plan, self._engine.held.params
        bad: dict[str, Tensor] = {}
        for bucket in plan.buckets:
            bad |= bad_parts(plan, 0, bucket, params[bucket.name], self._above)
        if not bad:
            return None
        first = facts_of(next(iter(bad.values())), "result")
        sighting = Sighting(
            graph="update",
            call=0,
            microbatch=None,
            position=0,
            operator=self._replay.package.recipe.optimizer,
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
