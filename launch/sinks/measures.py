"""What a run is measured by in Prometheus: names, and what each means. Without Ray, so that boards can be written anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TAGS = ("run", "package")
"""Of every measure: the name of the run's folder, and the first 12 digits of the package's digest."""
METRIC = "metric"
"""The tag of a measure of the job's own metrics, with the metric's name."""
_PREFIX = "ray_"
"""Ray's, before whatever it exports."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One name. kind: a counter begins at 0 with each driver of a run. own: whether it has the tag `METRIC`."""

    name: str
    description: str
    kind: Literal["gauge", "counter"] = "gauge"
    own: bool = False

    @property
    def exported(self) -> str:
        """Its name at the cluster's endpoints."""
        return f"{_PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")


RUNNING = Measure("trainload_running", "1 while the run has a driver, 0 when it has ended")
STEP = Measure("trainload_step", "Steps done")
STEPS = Measure("trainload_steps", "All steps of the run")
LOSS = Measure("trainload_loss", "Training loss of the last step")
GRADIENT_NORM = Measure("trainload_gradient_norm", "Norm of the gradient of the last step")
LOSS_SCALE = Measure("trainload_loss_scale", "What the loss is multiplied by, where it is scaled")
TOKENS = Measure("trainload_tokens_per_second", "Tokens of all ranks, a running mean")
ROWS = Measure("trainload_rows_per_second", "Rows of all ranks, a running mean")
STEP_SECONDS = Measure("trainload_step_seconds", "Time that steps have taken", "counter")
DATA_WAIT = Measure("trainload_data_wait_seconds", "Time that rank 0 has waited for data", "counter")
MFU = Measure("trainload_mfu_ratio", "Share of the devices' greatest FLOP/s that the model uses")
MEMORY = Measure("trainload_memory_bytes", "Greatest memory of any rank")
METRICS = Measure("trainload_metric", "The job's own metrics in the last step", own=True)
EVALUATION_LOSS = Measure("trainload_evaluation_loss", "Loss of the last evaluation")
EVALUATION_METRICS = Measure("trainload_evaluation_metric", "The job's own metrics in the last evaluation", own=True)
CHECKPOINT_STEP = Measure("trainload_checkpoint_step", "Step of the last published checkpoint")
CHECKPOINT_TIME = Measure("trainload_checkpoint_timestamp_seconds", "When it was published, in seconds since 1970")
CHECKPOINT_SECONDS = Measure("trainload_checkpoint_write_seconds", "How long it took to write")
CHECKPOINT_BYTES = Measure("trainload_checkpoint_bytes", "Its size")
FAILURES = Measure("trainload_failures", "Attempts of the run that failed, also under earlier drivers")
WARNINGS = Measure("trainload_warnings", "Warnings of the run, also under earlier drivers")

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
"""The name that a number has everywhere (`numbers_of`) -> its measure."""
OF_TEXTS: Mapping[str, Measure] = {"failure": FAILURES, "warning": WARNINGS}
"""Kind of event -> what counts it."""
OWN: Mapping[str, Measure] = {"metrics/": METRICS, "evaluation/": EVALUATION_METRICS}
"""How the names of the job's own metrics begin -> their measure."""
MEASURES = (RUNNING, STEP, STEPS, *OF_NUMBERS.values(), *OWN.values(), CHECKPOINT_STEP, CHECKPOINT_TIME, *OF_TEXTS.values())
"""All of them."""


def measure_of(name: str) -> tuple[Measure, str] | None:
    """The measure of a number by the name that it has everywhere, and the value of its tag `METRIC`, if it has that.

    Returns: None where it is not exported.
    """
    if name in OF_NUMBERS:
        return OF_NUMBERS[name], ""
    for start, measure in OWN.items():
        if name.startswith(start):
            return measure, name.removeprefix(start)
    return None
