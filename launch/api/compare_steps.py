"""Compare what a run recorded, losses and checkpoints, with its steps computed again."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.capture.job.ambient import neutrally
from trainload.core.storage.places import Where
from trainload.launching.api.replay import Replay, check_step
from trainload.launching.checkpoints.checkpoint_place import place_of
from trainload.launching.checkpoints.load import load_sharded
from trainload.launching.checkpoints.reader import Checkpoint
from trainload.launching.node.determinism import deterministic
from trainload.launching.node.utilisation import dtypes_of
from trainload.launching.run.journal import Event, stream_events
from trainload.launching.run.run_spec import RunSpec, read_spec
from trainload.launching.run.working_copy import viewed
from trainload.launching.worker.engine import NotFiniteError
from trainload.launching.worker.step_statistics import StepStatistics
from trainload.sharding.plans.parameters_within import parameters_within

_ROUNDING = {"float64": 1e-9, "float32": 1e-5}
"""Relative difference of losses that rounding explains, by the dtype of the products."""
_ROUNDING_OF_HALVES = 1e-2
_JUMP = 20.0
"""Factor by which a difference exceeds all before it if rounding does not explain it."""
_MEASURES = {"rms": 1e-3, "greatest": 1e-2}
"""Measure of a sampled statistic -> relative difference that rounding explains; samples have four
digits.
"""
_PARAMETERS = 1e-3
"""Relative difference of a parameter's values from which it is listed."""


@dataclass(frozen=True, slots=True)
class StepDifference:
    """A step's loss in the journal and computed again.

    Attributes:
        step: number of the step, from 1.
        recorded: loss in the journal.
        computed: loss computed again.
        relative: their difference over the greater magnitude.
    """

    step: int
    recorded: float
    computed: float
    relative: float


@dataclass(frozen=True, slots=True)
class ParameterDifference:
    """A parameter of a checkpoint that differs from the parameter computed again.

    Attributes:
        parameter: its name.
        relative: norm of the difference over the norm of the parameter.
        element: index of the element that differs most.
        recorded: the element in the checkpoint.
        computed: the element computed again.
        share: that element's part of the squared norm of the difference: 1 if it alone differs.
    """

    parameter: str
    relative: float
    element: tuple[int, ...]
    recorded: float
    computed: float
    share: float


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """A sampled statistic of a run that differs from the one computed again.

    Attributes:
        step: number of the step, from 1.
        module: path of the user's module.
        operator: activation function in it; "" for the result of the module.
        line: line of the user's code.
        measure: "rms" or "greatest".
        recorded: value in the journal.
        computed: value computed again.
    """

    step: int
    module: str
    operator: str
    line: str
    measure: str
    recorded: float
    computed: float


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Result of `compare_run`.

    Attributes:
        began: number of steps of the state with which the comparison began.
        steps: number of steps that were compared.
        greatest: the greatest relative difference of a loss that rounding explains.
        departure: the first step whose loss differs more than rounding explains; None if there is
            none.
        modules: statistics of the first sampled step at which any differ, in the order in which
            they are computed; () if none differ, or the run has no samples (setting `statistics`).
        checkpoint: number of steps of the first compared checkpoint with different parameters; None
            if there is none.
        parameters: its parameters that differ, the most different first.
        seconds: duration.

    Example:
        comparison = trainload.compare_run("runs/first")
        if comparison.departure is not None:
            print(comparison.departure.step, comparison.parameters[:3])
    """

    began: int
    steps: int
    greatest: float
    departure: StepDifference | None
    modules: tuple[ModuleDifference, ...]
    checkpoint: int | None
    parameters: tuple[ParameterDifference, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


@neutrally
def compare_run(run_dir: Where, *, step: int = 1, steps: int | None = None) -> RunComparison:
    """Compute steps of a run again, in one process and without compiled code, and find the first
    at which the run departs from them: a device that computes wrong, a bit that changed in memory,
    a rank whose parameters are not those of the others.

    It ends at the first departure, or at the next checkpoint after it, whose parameters are
    compared too. Nothing is written.

    Args:
        run_dir: folder or URL of the run.
        step: number of the first step to compare, from 1. It begins with the newest checkpoint
            before it, whose values are taken as right.
        steps: maximum number of steps to compute; None for all that the run has made.

    Raises:
        RequestError: the run has made no such step, or its settings were changed after it.
        TrainloadError: an error of the run, the package, the data or the checkpoints.

    Example:
        comparison = trainload.compare_run("runs/first", step=2)
        print(comparison.departure)
    """
    began = time.perf_counter()
    with viewed(run_dir) as files:
        spec = read_spec(files.folder)
        recorded = _Recorded.of(stream_events(files.folder))
        check_step(step, max(recorded.losses, default=-1) + 1, "the run has made no such step")
        with deterministic(spec.deterministic):
            return _Comparison(spec, recorded, began).run(step - 1, steps)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Records of a run by the number of the step, from 0; of a repeated step, the last ones.

    Attributes:
        losses: its loss.
        samples: graph -> sampled statistics of activations, as in the journal.
    """

    losses: dict[int, float]
    samples: dict[int, dict[str, Sequence[Mapping[str, Any]]]]

    @classmethod
    def of(cls, events: Iterable[Event]) -> _Recorded:
        """Return the records in a run's events."""
        recorded = cls({}, defaultdict(dict))
        for event in events:
            if event.kind == "step":
                recorded.losses[event.data["step"]] = event.data["loss"]
            elif event.kind == "statistics":
                of_step = recorded.samples[event.data["step"] - 1]
                of_step[event.data.get("graph", "")] = event.data["activations"]
        return recorded


class _Comparison:
    def __init__(self, spec: RunSpec, recorded: _Recorded, began: float) -> None:
        self._spec, self._began = spec, began
        self._losses, self._samples = recorded.losses, recorded.samples
        self._published = place_of(spec.place, spec.checkpoints).published()
        self._replay = Replay.of_run(spec)
        dtypes = dtypes_of(self._replay.built.work)
        self._rounding = max((_ROUNDING.get(d, _ROUNDING_OF_HALVES) for d in dtypes), default=1e-5)
        self._statistics = StepStatistics(self._replay.search, self._replay.built)

    def run(self, first: int, most: int | None) -> RunComparison:
        replay, engine = self._replay, self._replay.engine
        start = replay.load_before(self._spec, first)
        stop = max(self._losses) + 1
        stop = stop if most is None else min(stop, start + most)
        greatest, departure, compared = 0.0, None, 0
        modules: tuple[ModuleDifference, ...] = ()
        checkpoint: int | None = None
        parameters: tuple[ParameterDifference, ...] = ()
        for number, draws in replay.batches(start, stop):
            sampled = bool(self._samples.get(number)) and not modules
            collecting = self._statistics.collecting(engine) if sampled else nullcontext()
            try:
                with replay.explaining(number), collecting:
                    loss = engine.step(number, draws).loss
            except NotFiniteError as error:
                loss = error.value if error.quantity == "loss" else math.nan
            if sampled:
                modules = tuple(self._different_modules(number))
            if departure is None and number in self._losses:
                compared += 1
                difference = _difference(number, self._losses[number], loss)
                if difference.relative > max(self._rounding, _JUMP * greatest):
                    departure = difference
                else:
                    greatest = max(greatest, difference.relative)
            if number + 1 in self._published:
                parameters = tuple(self._different_parameters(number + 1))
                if parameters or departure is not None or modules:
                    checkpoint = number + 1 if parameters else None
                    break
            is_last = departure is not None and max(self._published, default=0) <= number + 1
            if is_last or not math.isfinite(loss):
                break
        seconds = time.perf_counter() - self._began
        return RunComparison(
            start, compared, greatest, departure, modules, checkpoint, parameters, seconds
        )

    def _different_modules(self, number: int) -> Iterator[ModuleDifference]:
        """Yield the statistics of a sampled step that differ from those computed again."""
        recorded = self._samples[number]
        for graph, statistics in self._statistics.collected():
            sampled = {
                (each["module"], each["operator"], each["number"]): each
                for each in recorded.get(graph if len(recorded) > 1 else "", ())
            }
            for each in statistics.activations:
                sample = sampled.get((each.module, each.operator, each.number))
                if sample is None:
                    continue
                for measure, most in _MEASURES.items():
                    computed = getattr(each, measure)
                    difference = _difference(number, sample[measure], computed)
                    if difference.relative > max(most, self._rounding):
                        yield ModuleDifference(
                            number + 1,
                            each.module,
                            each.operator,
                            each.line,
                            measure,
                            sample[measure],
                            computed,
                        )

    def _different_parameters(self, number: int) -> list[ParameterDifference]:
        """Return the parameters of a checkpoint that differ from those of the state."""
        plan = self._replay.plan
        state = load_sharded(Checkpoint.open(self._published[number]), plan, 0)
        differences: list[ParameterDifference] = []
        for bucket in plan.buckets:
            recorded = state.flats[bucket.name]["param"]
            computed = self._replay.engine.held.params[bucket.name].cpu()
            shapes = {slot.parameter: slot.shape for slot in bucket.slots}
            for name, low, high in parameters_within(plan, 0, bucket, len(recorded)):
                difference = _compared(name, shapes[name], recorded[low:high], computed[low:high])
                if difference is not None:
                    differences.append(difference)
        return sorted(differences, key=lambda each: -each.relative)


def _difference(number: int, recorded: float, computed: float) -> StepDifference:
    scale = max(abs(recorded), abs(computed))
    apart = abs(recorded - computed)
    relative = 0.0 if recorded == computed else apart / scale if math.isfinite(apart) else math.inf
    return StepDifference(number + 1, recorded, computed, relative)


def _compared(
    name: str, shape: tuple[int, ...], recorded: Tensor, computed: Tensor
) -> ParameterDifference | None:
    """Return the difference of a parameter; None if it is too small to be listed."""
    recorded, computed = recorded.double(), computed.double()
    apart = (recorded - computed).nan_to_num(math.inf, math.inf, math.inf)
    norm = computed.norm().item()
    relative = apart.norm().item() / norm if norm else 0.0
    if not relative > _PARAMETERS:
        return None
    place = int(apart.abs().argmax())
    squares = apart.square().sum().item()
    share = apart[place].item() ** 2 / squares if math.isfinite(squares) else 1.0
    return ParameterDifference(
        name,
        relative,
        tuple(int(each) for each in torch.unravel_index(torch.tensor(place), shape)),
        recorded[place].item(),
        computed[place].item(),
        share,
    )
