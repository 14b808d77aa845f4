"""Evaluate a package without training it: a run of zero steps, under any plan and on any
backend.
"""

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
    """Result of an evaluation.

    Attributes:
        loss: mean loss of the main graph, weighted by the job's row weights.
        metrics: metrics of the main graph, and those of other graphs as "graph.name".
        rows: number of evaluated rows.
        parts: {loss, metrics, rows} of each named part of a mixture.
        seconds: duration of the "evaluation" alone, and "in all".

    Example:
        result = trainload.evaluate(package, plan, "test.parquet")
        print(result.loss, result.metrics, result.rows)
    """

    loss: float
    metrics: Mapping[str, float]
    rows: int
    parts: Mapping[str, Mapping[str, Any]]
    seconds: Mapping[str, float]


class EvaluationRequest(EvaluationSettings, ExecutionOptions, PackageOptions):
    """Options of `evaluate`, in addition to the package, the plan and the data."""

    run_dir: str | Path | None = None
    """Folder to keep, on storage that all nodes share, or its URL.

    Default: one of this machine, which is removed afterwards.
    """


@neutrally
@takes_options(EvaluationRequest)
def evaluate(
    package: Package, plan: Plan, data: Data, request: EvaluationRequest
) -> EvaluationResult:
    """Evaluate a package with its evaluation graphs: every row once, under any plan.

    It compiles the same graphs as a training under this plan, and reuses those in the cache.

    Args:
        package: package to evaluate.
        plan: plan made for this package.
        data: rows, in the forms that `launch` accepts. Each named part of a mixture is also
            evaluated separately.
        request: fields of `EvaluationRequest`, passed as keyword arguments.

    Raises:
        RequestError: an option is unknown or invalid, or an address is passed without a run_dir,
            although the nodes of a cluster need a shared folder.
        TrainloadError: as for `launch`.

    Example:
        result = trainload.evaluate(package, plan, "test.parquet", eval_batches=10)
        print(result.loss)
    """
    began = time.perf_counter()
    options = {name: getattr(request, name) for name in request.model_fields_set - {"run_dir"}}
    with _run_place(request.run_dir, request.address) as run_dir:
        run = RunRequest(run_dir=run_dir, eval_data=data, **options)
        with checked(package, plan, data, run, evaluates_only=True) as evaluation:
            run_spec(
                evaluation.spec,
                request.backend,
                request.address,
                request.on_event or _ignore,
                new=True,
            )
            events = stream_events(evaluation.spec.folder)
            evaluations = [event for event in events if event.kind == "eval"]
    if not evaluations:
        raise TrainingError("nothing was evaluated", where=str(data))
    values = evaluations[-1].data
    return EvaluationResult(
        loss=values["loss"],
        metrics=values["metrics"],
        rows=values["rows"],
        parts=values.get("parts", {}),
        seconds={"evaluation": values["seconds"], "in all": round(time.perf_counter() - began, 3)},
    )


@contextmanager
def _run_place(run_dir: str | Path | None, address: str | None) -> Iterator[str | Path]:
    if run_dir is not None:
        yield run_dir
        return
    if address is not None:
        raise RequestError(
            "a cluster needs a run folder on shared storage",
            where="run_dir",
            hint="Pass --run-dir with a folder that all nodes can reach, or a URL.",
        )
    with tempfile.TemporaryDirectory(prefix="trainload-evaluate-") as folder:
        yield Path(folder) / "run"


def _ignore(event: Event) -> None:
    """Do nothing: the default callback."""
