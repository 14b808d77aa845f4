"""Explain to a user why a step failed: by the row of the data, or the model's operator and its line
in the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainload.core.errors import DataError, TrainingError, TrainloadError, raised
from trainload.launching.data.run_data import RunData
from trainload.launching.verification.allocation_errors import is_out_of_memory
from trainload.launching.worker.calls import Microbatch
from trainload.launching.worker.engine import Engine, NotFiniteError
from trainload.launching.worker.out_of_memory import explain_memory
from trainload.launching.worker.rejected_values import Rejected, find_rejected
from trainload.packaging.package import Package
from trainload.sharding.plans.device_step_graphs import places_in_step, step_graphs
from trainload.sharding.plans.plan import Plan

_CPU = torch.device("cpu")
_PEER_WORDS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket",
    "process group",
    "TCPStore",
)
"""Words in errors that are caused by the end of another rank, not by what this rank computes."""


@dataclass(frozen=True, slots=True)
class Failing:
    """A rank that raised an error.

    Attributes:
        package: package that is trained.
        plan: plan of the run.
        rank: number of the rank.
        engine: engine of the rank.
        device: device of the rank.
    """

    package: Package
    plan: Plan
    rank: int
    engine: Engine
    device: torch.device


@contextmanager
def explaining(failing: Failing, data: RunData, source: str, when: str) -> Iterator[None]:
    """Replace an error of a kernel within the context by one that a user can act on.

    NotFiniteError passes. The other arguments are those of `explain`.
    """
    try:
        yield
    except NotFiniteError:
        raise
    except Exception as error:
        explained = explain(error, failing, data, source, when)
        if explained is None or explained is error:
            raise
        raise explained from error


def explain(
    error: Exception, failing: Failing, data: RunData, source: str, when: str
) -> TrainloadError | None:
    """Return an error that explains a failed step to a user; None if another rank or the machine
    may be the cause.

    Args:
        error: error raised by a graph or by torch.
        failing: rank that raised it.
        data: data of the microbatches.
        source: path or URL of the data.
        when: "step 3", "the evaluation after step 3".
    """
    if isinstance(error, TrainloadError):
        return error
    if is_out_of_memory(error):
        return explain_memory(
            error,
            failing.package,
            failing.plan,
            failing.engine.held,
            failing.device,
            failing.rank,
            when,
        )
    if _may_be_caused_by_peers(error):
        return None
    package = failing.package
    program = package.program()
    steps = step_graphs(package, _CPU, dict.fromkeys(graph for graph, _ in failing.engine.calling))
    for graph, microbatch in failing.engine.calling:
        rejected = find_rejected(steps[graph], microbatch.batch, program.constants, program.state)
        if rejected is not None:
            return _data_error(rejected, package, graph, microbatch, data, source, when)
    return explain_without_rows(error, when)


def explain_without_rows(error: Exception, when: str) -> TrainloadError | None:
    """Return an error that explains one that no row of the data causes; None if another rank or the
    machine may be the cause.

    Args:
        error: error raised by a graph or by torch.
        when: "step 3", "building the graphs".
    """
    if isinstance(error, TrainloadError):
        return error
    if (
        is_out_of_memory(error)
        or _may_be_caused_by_peers(error)
        or _may_be_caused_by_machine(error)
    ):
        return None
    return TrainingError(
        raised(error).rstrip("."),
        where=when,
        hint=(
            "The traceback is in the rank's log: trainload logs RUN --rank N. An evaluation keeps"
            " its logs only with --run-dir. The run is not retried, since it would fail again."
        ),
    )


def _may_be_caused_by_peers(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _PEER_WORDS)


def _may_be_caused_by_machine(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError | OSError) or "CUDA error" in str(error)


def _data_error(
    rejected: Rejected,
    package: Package,
    graph: str,
    microbatch: Microbatch,
    data: RunData,
    source: str,
    when: str,
) -> DataError:
    line = places_in_step(package, graph, _CPU).get(rejected.node, "")
    row, of = data.origin(microbatch.part, microbatch.rows, rejected.row, source)
    return DataError(
        rejected.problem + (f" at {line}" if line else ""),
        where=f"{when}, {of if row is None else f'row {row} of {of}'}",
        expected=rejected.expected,
        got=rejected.got,
        hint=(
            "Fix this row of the data (rows are counted from 0), or what the model computes"
            " from it."
        ),
    )
