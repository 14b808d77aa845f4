"""Evaluating a package on rows, without training it: a run of no steps, under any plan and wherever runs are run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import RequestError, TrainingError
from trainload.launching.api.launch import run_spec
from trainload.launching.api.request import ExecutionOptions, PackageOptions, RunRequest, checked
from trainload.launching.data.made_data import Data
from trainload.launching.run.journal import Event, stream_events
from trainload.launching.settings.options import takes_options
from trainload.launching.settings.run_settings import EvaluationSettings
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What rows were evaluated to.

    Attributes:
        loss: the main graph's mean, by the job's weights of rows.
        metrics: its metrics, and those of other graphs as "graph.name".
        rows: how many were evaluated.
        parts: the same of each part of a mixture that has a name: {loss, metrics, rows}.
        seconds: of the evaluation alone, and "in all".
    """

    loss: float
    metrics: Mapping[str, float]
    rows: int
    parts: Mapping[str, Mapping[str, Any]]
    seconds: Mapping[str, float]


class EvaluationRequest(EvaluationSettings, ExecutionOptions, PackageOptions):
    """What `evaluate` takes beside package, plan and data."""

    run_dir: str | Path | None = None
    """Folder to keep, on storage that all nodes share. Default: one of this machine, which is removed afterwards."""


@neutrally
@takes_options(EvaluationRequest)
def evaluate(package: Package, plan: Plan, data: Data, request: EvaluationRequest) -> EvaluationResult:
    """Evaluate a package with its eval graphs: every row once, under any plan.

    It compiles what a training of the package under this plan compiles, and reuses what one has left in the cache.

    Args:
        package: the package.
        plan: made for this package.
        data: rows, as of `launch`; of a mixture, each part that has a name is evaluated separately as well.
        request: given as keyword arguments: the fields of `EvaluationRequest`.

    Raises:
        RequestError: an option is unknown or invalid; there is no run_dir, and a cluster's nodes need one that they share.
        TrainloadError: as `launch`.
    """
    began = time.perf_counter()
    options = {name: getattr(request, name) for name in request.model_fields_set - {"run_dir"}}
    with _folder(request.run_dir, request.address) as run_dir:
        run = RunRequest(run_dir=run_dir, eval_data=data, **options)
        with checked(package, plan, data, run, evaluates_only=True) as evaluation:
            run_spec(evaluation.spec, request.backend, request.address, request.on_event or _ignore, new=True)
        found = [event for event in stream_events(run_dir) if event.kind == "eval"]
    if not found:
        raise TrainingError("nothing was evaluated", where=str(data))
    told = found[-1].data
    return EvaluationResult(
        loss=told["loss"],
        metrics=told["metrics"],
        rows=told["rows"],
        parts=told.get("parts", {}),
        seconds={"evaluation": told["seconds"], "in all": round(time.perf_counter() - began, 3)},
    )


@contextmanager
def _folder(run_dir: str | Path | None, address: str | None) -> Iterator[Path]:
    if run_dir is not None:
        yield Path(run_dir).absolute()
        return
    if address is not None:
        raise RequestError(
            "the nodes of a cluster need a folder that they share", where="run_dir", hint="Give --run-dir, on storage that all nodes have."
        )
    with tempfile.TemporaryDirectory(prefix="trainload-evaluate-") as folder:
        yield Path(folder) / "run"


def _ignore(event: Event) -> None:
    """For callers that do not watch."""
