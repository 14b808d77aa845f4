"""Settings of a run, each declared once.

The command line, the Python API, `--set`, the tables of docs/reference/settings.md and the JSON
schema are made from these models:

    >>> RunSettings(steps=100, keep_best=2).keep
    2
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainload.launching.settings.info import SettingInfo
from trainload.launching.settings.overrides import LAW, Overrides

MAX_STEPS = 2**53 - 1
"""Largest integer that JSON readers are sure to keep exactly."""
_MAX_ROWS = 2**31 - 1
SinkName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
"""Name of an entry point of the group `trainload.sinks`; the machine of the driver knows which
there are.
"""
Weights = Literal["mean", "last"]


class Settings(BaseModel):
    """Base class of models of settings. The docstring of a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EvaluationSettings(Settings):
    """Settings that evaluations and trainings have."""

    eval_batches: Annotated[int | None, SettingInfo(unit="global batches")] = Field(
        default=None, ge=1
    )
    """Maximum length of an evaluation, for each part of the held-out data. Default: all rows."""
    compile: Annotated[bool, SettingInfo(option="--no-compile")] = True
    """Compile the graphs with Inductor. False runs them uncompiled."""
    deterministic: bool = True
    """Give the same bits in every run and after every restart. False allows faster operators, such
    as cuDNN's attention on GPUs and atomic additions, whose sums have another order in each call.
    """
    max_failures: Annotated[int, SettingInfo(unit="failures")] = Field(default=3, ge=0)
    """Number of consecutive failures, without a new checkpoint between them, after which a run
    fails.

    Failures of storage do not count.
    """
    hang_timeout: Annotated[float, SettingInfo(unit="s")] = Field(default=300.0, gt=0)
    """Time without progress of a rank after which it is restarted. On Ray."""
    start_timeout: Annotated[float, SettingInfo(unit="s")] = Field(default=3600.0, gt=0)
    """Replaces `hang_timeout` before the first step (weights, data, compilation), and while a
    compiled graph is compared.
    """
    straggler_factor: Annotated[float, SettingInfo()] = Field(default=1.5, gt=1)
    """A rank whose own work takes this many times as long as the median of the others, over 20
    steps and 30 s, is reported. On Ray, without a pipeline.
    """
    node_patience: Annotated[float, SettingInfo(unit="s")] = Field(default=1800.0, ge=0)
    """Time to wait for nodes that were lost or are in use, and for the cluster to respond."""
    idle_timeout: Annotated[float, SettingInfo(unit="s")] = Field(default=300.0, ge=0)
    """Time for which a node of a cluster keeps the process from which its ranks were forked, so
    that the next launch there starts sooner. On Ray.
    """
    overrides: Overrides = Overrides()
    """Changes of what the package trains.

    If they freeze parameters or add adapters, the plan is made for `overrides.apply(package)`.
    """


class RunSettings(EvaluationSettings):
    """Settings of a training run.

    Example:
        settings = trainload.RunSettings(steps=1000, checkpoint_every=100)
        print(trainload.RunSettings.model_json_schema()["properties"]["hang_timeout"]["description"])
    """

    steps: Annotated[int | None, SettingInfo(unit="updates", option="--steps")] = Field(
        default=None, ge=1, le=MAX_STEPS
    )
    """Length of the run. Default: that of the package's recipe."""
    cuda_graphs: bool = False
    """Record each training graph as a CUDA graph, which the host launches at once. For models so
    small that launching kernels takes longer than computing them. The memory of a call is then used
    for nothing else, and stragglers are not found, since waits are not measured. On GPUs, without a
    pipeline or offload.
    """
    eval_every: Annotated[int | None, SettingInfo(unit="updates", option="--eval-every")] = Field(
        default=None, ge=1
    )
    """Updates between two evaluations.

    The held-out data is also evaluated before the first and after the last update.
    """
    checkpoint_every: Annotated[
        int | None, SettingInfo(unit="updates", option="--checkpoint-every")
    ] = Field(default=None, ge=1)
    """Updates between two checkpoints. There is always one at the end."""
    checkpoints: Annotated[
        str | Path | None,
        SettingInfo(
            fixed="the run's checkpoints are stored there: launch a new run to store them elsewhere"
        ),
    ] = None
    """Folder or fsspec URL (`s3://bucket/folder`) for the checkpoints, which all nodes reach and no
    other run uses. Default: in the run's folder.
    """
    keep: Annotated[int, SettingInfo(unit="checkpoints")] = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept."""
    keep_best: Annotated[int, SettingInfo(unit="checkpoints")] = Field(default=0, ge=0)
    """Number of checkpoints with the lowest evaluation losses that are kept as well. Choose
    `--eval-every` and `--checkpoint-every` so that they coincide.
    """
    keep_every: Annotated[int | None, SettingInfo(unit="updates")] = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this are kept as well."""
    optimizer_from: Annotated[
        str | Path | None, SettingInfo(fixed="it is fixed when the run starts: launch a new run")
    ] = None
    """Folder of the run that made the package, or of its checkpoints: optimizer state, running
    means and loss scales continue from there. Schedule and step count start anew.
    """
    require_compiled: bool = False
    """Fail the run, rather than run a graph uncompiled that cannot be compiled or whose compiled
    form differs.
    """
    sinks: Sequence[SinkName] = ()
    """Destinations of metrics beside the journal (docs/guides/trackers.md): `tensorboard` (files in
    the run's folder), `mlflow` (`MLFLOW_TRACKING_URI`), `wandb` (Weights & Biases), `opentelemetry`
    (an OTLP collector), `prometheus` (the endpoints of the Ray cluster), or a sink of another
    installed distribution. Each of ours needs the extra of its name. A run whose sink fails
    continues, with a warning.
    """
    statistics: Annotated[int | None, SettingInfo(unit="updates")] = Field(default=None, ge=1)
    """Updates between two samples of statistics by module (activations, gradients, updates over
    parameters), which the journal, the page of the run and the sinks show. Default: none. A sample
    computes forward and update once more, without compiled code.
    """
    storage_patience: Annotated[float, SettingInfo(unit="s")] = Field(default=600.0, ge=0)
    """Time for which storage may fail before the run does, counted from the last completed step."""
    weights: Weights = "mean"
    """Weights that are evaluated and written if the job keeps a running mean: `mean` or `last`."""


class BatchSettings(Settings):
    """Settings of the plan that a launch makes if none is given."""

    global_batch: Annotated[int | None, SettingInfo(unit="rows", fixed=LAW)] = Field(
        default=None, ge=1, le=_MAX_ROWS
    )
    """Rows of an update, over all ranks and microbatches."""
    accumulate: Annotated[
        int | None,
        SettingInfo(
            unit="microbatches",
            fixed="it is part of the plan: pass another plan with the run's global batch as --plan",
        ),
    ] = Field(default=None, ge=1, le=_MAX_ROWS)
    """Microbatches of an update (gradient accumulation)."""
