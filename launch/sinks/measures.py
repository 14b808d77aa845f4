"""Names and descriptions of a run's metrics in all sinks.

A number has one name in TensorBoard, MLflow and W&B ("loss", "metrics/accuracy"), which is the one
that sinks receive, and one measure in Prometheus and OpenTelemetry, whose names have no variable
parts. docs/guides/trackers.md has the table.

It does not import Ray, so that dashboards can be written anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

TAGS = ("run", "package")
"""Tags of every measure: the name of the run's folder, and the first 12 digits of the package's
digest.
"""
METRIC = "metric"
"""Tag with the name of one of the job's own metrics."""
_PREFIX = "ray_"
"""Prefix that Ray adds to all exported names."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of Prometheus and OpenTelemetry.

    Attributes:
        name: name in Ray, without its prefix.
        description: help text.
        kind: gauge or counter. A counter begins at 0 with each driver of a run.
        own: True if it has the tag `METRIC`.
        unit: its unit in UCUM; "" for a number without one.
    """

    name: str
    description: str
    kind: Literal["gauge", "counter"] = "gauge"
    own: bool = False
    unit: str = ""

    @property
    def exported(self) -> str:
        """Name at the cluster's metrics endpoints."""
        return f"{_PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")

    @property
    def dotted(self) -> str:
        """Name in OpenTelemetry."""
        return self.name.replace("_", ".", 1)


RUNNING = Measure("trainload_running", "1 while the run has a driver, 0 when it has ended")
STEP = Measure("trainload_step", "Steps done")
STEPS = Measure("trainload_steps", "Total steps of the run")
LOSS = Measure("trainload_loss", "Training loss of the last step")
GRADIENT_NORM = Measure("trainload_gradient_norm", "Norm of the gradient of the last step")
LOSS_SCALE = Measure("trainload_loss_scale", "Loss scale, if the loss is scaled")
TOKENS = Measure(
    "trainload_tokens_per_second", "Tokens per second over all ranks, as a running mean"
)
ROWS = Measure("trainload_rows_per_second", "Rows per second over all ranks, as a running mean")
STEP_SECONDS = Measure("trainload_step_seconds", "Total time of all steps", "counter", unit="s")
DATA_WAIT = Measure(
    "trainload_data_wait_seconds", "Total time that rank 0 waited for data", "counter", unit="s"
)
MFU = Measure("trainload_mfu_ratio", "Model FLOP/s as a share of the devices' peak FLOP/s")
MEMORY = Measure("trainload_memory_bytes", "Largest memory usage of any rank", unit="By")
METRICS = Measure("trainload_metric", "The job's own metrics in the last step", own=True)
EVALUATION_LOSS = Measure("trainload_evaluation_loss", "Loss of the last evaluation")
EVALUATION_METRICS = Measure(
    "trainload_evaluation_metric", "The job's own metrics in the last evaluation", own=True
)
STATISTICS = Measure(
    "trainload_statistics",
    "Statistics of the last step that was sampled, by module or parameter",
    own=True,
)
CHECKPOINT_STEP = Measure("trainload_checkpoint_step", "Step of the last published checkpoint")
CHECKPOINT_TIME = Measure(
    "trainload_checkpoint_timestamp_seconds",
    "Time of the last published checkpoint, in seconds since 1970",
    unit="s",
)
CHECKPOINT_SECONDS = Measure(
    "trainload_checkpoint_write_seconds", "Time to write the last checkpoint", unit="s"
)
CHECKPOINT_BYTES = Measure("trainload_checkpoint_bytes", "Size of the last checkpoint", unit="By")
# Gauges, not counters: Prometheus' `increase` needs an earlier value, so a counter that begins with
# the first failure never shows it.
FAILURES = Measure(
    "trainload_failures", "Failed attempts of the run, including those under earlier drivers"
)
WARNINGS = Measure(
    "trainload_warnings", "Warnings of the run, including those under earlier drivers"
)

OF_NUMBERS: Mapping[str, Measure] = {
    "loss": LOSS,
    "gradient_norm": GRADIENT_NORM,
    "loss_scale": LOSS_SCALE,
    "tokens_per_second": TOKENS,
    "rows_per_second": ROWS,
    "seconds": STEP_SECONDS,
    "data_wait": DATA_WAIT,
    "mfu": MFU,
    "memory": MEMORY,
    "evaluation/loss": EVALUATION_LOSS,
    "checkpoint/seconds": CHECKPOINT_SECONDS,
    "checkpoint/bytes": CHECKPOINT_BYTES,
}
"""Name of a number in all sinks (`numbers_of`) -> its measure."""
OF_TEXTS: Mapping[str, Measure] = {"failure": FAILURES, "warning": WARNINGS}
"""Kind of event -> the measure that counts such events."""
OWN: Mapping[str, Measure] = {
    "metrics/": METRICS,
    "evaluation/": EVALUATION_METRICS,
    "statistics/": STATISTICS,
}
"""Prefix of the names of numbers that depend on the job -> their measure."""
MEASURES = (
    RUNNING,
    STEP,
    STEPS,
    *OF_NUMBERS.values(),
    *OWN.values(),
    CHECKPOINT_STEP,
    CHECKPOINT_TIME,
    *OF_TEXTS.values(),
)
"""All measures."""


def measure_of(name: str) -> tuple[Measure, str] | None:
    """Return the measure of a number and the value of its tag `METRIC`, "" if it has none; None if
    it is not exported.

    `name` is the number's name in all sinks (`numbers_of`).
    """
    if name in OF_NUMBERS:
        return OF_NUMBERS[name], ""
    for start, measure in OWN.items():
        if name.startswith(start):
            return measure, name.removeprefix(start)
    return None


def measured(
    values: Mapping[str, float], step: int, time: float
) -> Iterator[tuple[Measure, str, float]]:
    """Yield measure, value of its tag `METRIC` and value, for the numbers that a sink receives and
    for what follows from them.
    """
    for name, value in values.items():
        target = measure_of(name)
        if target is not None:
            yield *target, value
    if "loss" in values:
        yield STEP, "", float(step)
    if "checkpoint/bytes" in values:
        yield CHECKPOINT_STEP, "", float(step)
        yield CHECKPOINT_TIME, "", time
