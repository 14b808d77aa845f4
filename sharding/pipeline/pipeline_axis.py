"""The pipeline axis of a plan: stages for a package's graphs, an order for their work, and what their ranks send one another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.guards.size_expressions import parse
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.pipeline.balance import Homes, choose_stages
from trainload.sharding.pipeline.stage_schedule import make_order, stage_ranks
from trainload.sharding.pipeline.stages import Stages, Value, cut
from trainload.sharding.plans.buckets import item_bytes
from trainload.sharding.plans.plan import Pipeline, Plan
from trainload.sharding.plans.strategies import Schedule

DEFAULT: Schedule = "1f1b"


@dataclass(frozen=True, slots=True)
class PipelineAxis:
    """pipeline: of the plan. homes: parameter or buffer -> its stages. stages: of the main training graph. microbatches: of one update."""

    pipeline: Pipeline
    homes: Homes
    stages: Stages
    microbatches: int

    def sent(self, rows: int) -> float:
        """Bytes that the rank which sends most sends for one microbatch of so many rows."""
        symbols = {name: rows if at == 0 else self.stages.example[name] for name, (_, at) in self.stages.symbols.items()}
        by_rank = [0.0] * self.pipeline.ranks
        ranks = self.pipeline.stage_ranks
        for boundary, (up, down) in enumerate(zip(self.stages.up, self.stages.down, strict=True)):
            source, target = ranks[boundary], ranks[boundary + 1]
            if source != target:
                by_rank[source] += bytes_of(up, symbols)
                by_rank[target] += bytes_of(down, symbols)
        return max(by_rank)


def bytes_of(values: Iterable[Value], symbols: Mapping[str, int]) -> int:
    """Bytes of values that are sent, where the batch's symbols have these values."""
    return sum(math.prod(shape_of(value, symbols)) * item_bytes(value.dtype) for value in values)


def shape_of(value: Value, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of a value that is sent, where the batch's symbols have these values."""
    return tuple(size if isinstance(size, int) else parse(size).value(symbols) for size in value.shape)


def default_microbatches(rows: int, ranks: int, schedule: Schedule | None, per_rank: int | None) -> int:
    """Up to twice the ranks of a pipeline: as many as divide the rows of a rank of the data axis, and the schedule takes."""
    for count in range(2 * ranks, 0, -1):
        if rows % count == 0:
            try:
                make_order(schedule or DEFAULT, ranks, per_rank or _stages_of(schedule), count)
            except PlanError:
                continue
            return count
    return ranks


def pipe(
    package: Package,
    training: Sequence[StepGraph],
    local: Mapping[str, StepGraph],
    ranks: int,
    schedule: Schedule | None,
    per_rank: int | None,
    microbatches: int,
) -> PipelineAxis:
    """Finds stages for a package's graphs.

    Args:
        package: what is to be trained.
        training: its training graphs, the main one first.
        local: its step graphs by name, as one rank of the other axes has them.
        ranks: of the pipeline.
        schedule: None: DEFAULT.
        per_rank: stages of each rank; None: what the schedule has at least.
        microbatches: of one update.

    Raises:
        PlanError: the graphs cannot be cut so, or the schedule cannot be made.
    """
    if package.recipe.feeds or len({turn.graph for turn in package.recipe.turns}) > 1:
        raise PlanError(
            "a pipeline takes a job of one graph",
            where="pipeline_ranks",
            expected="no graphs that run in turns",
            got=", ".join(dict.fromkeys(turn.graph for turn in package.recipe.turns)),
            hint="Use the data axis and the tensor axis for this job.",
        )
    name = schedule or DEFAULT
    count = per_rank or _stages_of(name)
    order = make_order(name, ranks, count, microbatches)
    homes_of_stages = stage_ranks(name, ranks, count)
    homes = choose_stages(training, len(homes_of_stages))
    parameters = {p.name for p in package.parameters}
    buffers = {name: stages[0] for name, stages in homes.items() if name not in parameters}
    pipeline = Pipeline(ranks=ranks, schedule=name, stage_ranks=homes_of_stages, order=order, buffers=dict(sorted(buffers.items())))
    found: Stages | None = None
    for graph, step in local.items():  # what cannot be cut is said now
        made = cut(step, homes, len(homes_of_stages))
        found = made if graph == package.manifest.training_graphs()[0] else found
    assert found is not None
    return PipelineAxis(pipeline, {name: homes.get(name, (0,)) for name in sorted(parameters | set(homes))}, found, microbatches)


def cut_for(step: StepGraph, plan: Plan) -> Stages:
    """Cuts a step graph, as one rank of the other axes has it, into the stages of a plan."""
    assert plan.pipeline is not None
    homes: dict[str, tuple[int, ...]] = {slot.parameter: bucket.stages for bucket in plan.buckets for slot in bucket.slots}
    homes |= {name: (stage,) for name, stage in plan.pipeline.buffers.items()}
    return cut(step, homes, len(plan.pipeline.stage_ranks))


def _stages_of(schedule: Schedule | None) -> int:
    return 2 if schedule in ("zbv", "dualpipev") else 1


def dtype_of(value: Value) -> torch.dtype:
    """The dtype of a value that is sent."""
    found: torch.dtype = getattr(torch, value.dtype)
    return found
