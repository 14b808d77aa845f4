"""Compare the values of a step with those of other executions of it: in float64, on another device,
or under another version of torch.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import DivergedError
from trainload.launching.api.replay import replaying
from trainload.launching.debugging.recorded_values import RecordedValues, Recorder, Way
from trainload.launching.debugging.value_departures import ValueComparison, compare_values
from trainload.launching.worker.engine import NotFiniteError
from trainload.packaging.package import Package
from trainload.sharding.rewriting.rank_update import UpdateStep

_ROUNDED_RUNS = 2


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Result of `compare_step`.

    Attributes:
        step: number of the step, from 1.
        against: the other execution: "float64", or the machine of a file.
        values: the differences.
        seconds: duration.

    Example:
        comparison = trainload.compare_step("runs/first", "float64", step=2)
        print(comparison.values.first)
    """

    step: int
    against: str
    values: ValueComparison
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "step": self.step,
            "against": self.against,
            "seconds": round(self.seconds, 3),
            **self.values.as_json(),
        }


@neutrally
def compare_step(
    source: str | Path | Package,
    against: Literal["float64"] | Path,
    *,
    data: str | Path | None = None,
    step: int | None = None,
) -> StepComparison:
    """Compute a step again, interpreted and in one process, and find the first value at which it
    parts from another execution of the same step by more than rounding explains.

    The distance that rounding explains is measured: the step is also computed twice with random
    errors in the last place of every result.

    Args:
        source: folder or URL of a run, or a package.
        against: "float64", to compute every operator in float64; or a file of `record_step`, from
            another machine, device or version of torch.
        data: rows, for a package: path, URL or mixture, as for `launch`.
        step: number of the step, from 1. Default: the last one of a run; the first step for a
            package.

    Raises:
        RequestError: the step does not exist, a package has no data, or a run has its own.
        StorageError: the file cannot be read.
        TrainloadError: an error of the run, the package, the data or the checkpoints.

    Example:
        comparison = trainload.compare_step("runs/first", "float64", step=2)
        for each in comparison.values.values:
            print(each.what, each.distance, each.explained)
    """
    began = time.perf_counter()
    file = None if against == "float64" else RecordedValues.load(Path(against))
    ways = [(Way.OWN, 0), *((Way.ROUNDED, seed) for seed in range(_ROUNDED_RUNS))]
    if file is None:
        ways.append((Way.FLOAT64, 0))
    number, (own, *others) = _recorded(source, data, step, ways)
    other = others.pop() if file is None else file
    return StepComparison(
        number + 1,
        "float64" if file is None else file.where,
        compare_values(own, other, others),
        time.perf_counter() - began,
    )


@neutrally
def record_step(
    source: str | Path | Package,
    file: str | Path,
    *,
    data: str | Path | None = None,
    step: int | None = None,
) -> None:
    """Write sketches of all values of a step to a file, for `compare_step` on another machine.

    Args:
        source: folder or URL of a run, or a package.
        file: path of the new file, a safetensors file of about 600 bytes for each operator.
        data: as for `compare_step`.
        step: as for `compare_step`.

    Raises:
        RequestError: the step does not exist, a package has no data, or a run has its own.
        StorageError: the file exists, or cannot be written.
        TrainloadError: an error of the run, the package, the data or the checkpoints.

    Example:
        trainload.record_step("runs/first", "step-2.values", step=2)
        comparison = trainload.compare_step("runs/first", Path("step-2.values"), step=2)
        print(comparison.values.first)
    """
    _, (own,) = _recorded(source, data, step, [(Way.OWN, 0)])
    own.save(Path(file))


def _recorded(
    source: str | Path | Package,
    data: str | Path | None,
    step: int | None,
    ways: Sequence[tuple[Way, int]],
) -> tuple[int, list[RecordedValues]]:
    """Return the number of a step, from 0, and its values, computed in these ways with these seeds
    of rounding errors.
    """
    with replaying(source, data, step) as (replay, start, number):
        engine = replay.engine
        recorders = [Recorder(replay.plan, way, seed) for way, seed in ways]
        where = f"{torch.__version__} on {replay.search.device.type} of {platform.node()}"

        def record(update: UpdateStep, arguments: Sequence[Tensor]) -> None:
            for recorder in recorders:
                engine.repeat_turn(recorder.recording(replay.built))
                recorder.record.where = f"torch {where}"

        for each, draws in replay.batches(start, number + 1):
            engine.before_update = record if each == number else None
            try:
                with replay.explaining(each):
                    engine.step(each, draws)
            except NotFiniteError:
                if each < number:
                    raise DivergedError(
                        "the loss or the gradient is not finite",
                        where=f"step {each + 1}",
                        hint=f"Search this step: trainload debug --step {each + 1}.",
                    ) from None
        return number, [recorder.record for recorder in recorders]
