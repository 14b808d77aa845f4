"""Evaluating a package on rows, without training it: a run of no steps, under any plan and wherever runs are run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from trainload.capture.ambient import neutrally
from trainload.capture.errors import RequestError, TrainingError
from trainload.launching.journal import Event, stream_events
from trainload.launching.overrides import Overrides
from trainload.made_data import Data
from trainload.packaging.op_libraries import Libraries
from trainload.packaging.read import Package
from trainload.run_request import Backend, RunOptions, check_options, checked
from trainload.running import run_spec
from trainload.sharding.plan import Plan


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


class EvaluationOptions(TypedDict, total=False):
    """What `evaluate` takes beside package, plan and data: of `RunOptions`, with the same meaning.

    run_dir: a folder to keep, on storage that all nodes share; None: one of this machine's, which goes again.
    """

    run_dir: str | Path | None
    eval_batches: int | None
    overrides: Overrides
    compile: bool
    max_failures: int
    hang_timeout: float
    start_timeout: float
    node_patience: float
    backend: Backend
    address: str | None
    libraries: Libraries
    trust_extensions: bool
    policy: str | Path | None


@neutrally
def evaluate(
    package: Package, plan: Plan, data: Data, *, on_event: Callable[[Event], None] | None = None, **options: Unpack[EvaluationOptions]
) -> EvaluationResult:
    """Evaluates a package with its eval graphs: every row once, whatever the plan.

    It compiles what a training of the package under this plan compiles, and uses what one has left in the cache.

    Args:
        package: what is evaluated.
        plan: how; made for this package.
        data: rows, as of `launch`; of a mixture, each part that has a name is told too.
        on_event: told everything that happens.
        options: see `EvaluationOptions`.

    Raises:
        RequestError: there is no run_dir, and a cluster's nodes need one that they share.
        TrainloadError: as `launch`.
    """
    began = time.perf_counter()
    check_options(options, EvaluationOptions)
    backend, address = options.get("backend", "ray"), options.get("address")
    with _folder(options.pop("run_dir", None), address) as run_dir:
        request = cast(RunOptions, {**options, "run_dir": run_dir, "eval_data": data, "steps": 0})
        with checked(package, plan, data, request, least_steps=0) as (spec, _):
            run_spec(spec, backend, address, on_event or _ignore, new=True)
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
            "the nodes of a cluster need a folder that they share", where="run_dir", cure="Give --run-dir, on storage that all nodes have."
        )
    with tempfile.TemporaryDirectory(prefix="trainload-evaluate-") as folder:
        yield Path(folder) / "run"


def _ignore(event: Event) -> None:
    """For callers that do not watch."""
