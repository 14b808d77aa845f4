"""The pipeline axis of a plan: the stages of a package's graphs, the order of their work, and the
messages of its ranks.
"""

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
    """Pipeline of a package.

    Attributes:
        pipeline: the plan's pipeline.
        homes: parameter or buffer -> its stages.
        stages: stages of the main training graph.
        microbatches: microbatches of one update.
    """

    pipeline: Pipeline
    homes: Homes
    stages: Stages
    microbatches: int

    def sent(self, rows: int) -> float:
        """Return the bytes that the rank with the most communication sends for one microbatch of
        this number of rows.
        """
        symbols = {
            name: rows if at == 0 else self.stages.example[name]
            for name, (_, at) in self.stages.symbols.items()
        }
        by_rank = [0.0] * self.pipeline.ranks
        ranks = self.pipeline.stage_ranks
        for boundary, (up, down) in enumerate(zip(self.stages.up, self.stages.down, strict=True)):
            source, target = ranks[boundary], ranks[boundary + 1]
            if source != target:
                by_rank[source] += bytes_of(up, symbols)
                by_rank[target] += bytes_of(down, symbols)
        return max(by_rank)


def bytes_of(values: Iterable[Value], symbols: Mapping[str, int]) -> int:
    """Return the bytes of values that are sent, for these values of the batch's symbols."""
    return sum(math.prod(shape_of(value, symbols)) * item_bytes(value.dtype) for value in values)


def shape_of(value: Value, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of a value that is sent, for these values of the batch's symbols."""
    return tuple(
        size if isinstance(size, int) else parse(size).value(symbols) for size in value.shape
    )


def default_microbatches(
    rows: int, ranks: int, schedule: Schedule | None, per_rank: int | None
) -> int:
    """Return the greatest number of microbatches, up to twice the ranks, that divides the rows of a
    data rank and that the schedule accepts.
    """
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
    """Find stages for a package's graphs.

    Args:
        package: the package.
        training: its training graphs, the main one first.
        local: its step graphs by name, for one rank of the other axes.
        ranks: ranks of the pipeline.
        schedule: schedule; None for DEFAULT.
        per_rank: stages of each rank; None for the schedule's minimum.
        microbatches: microbatches of one update.

    Raises:
        PlanError: the graphs cannot be cut so, or the schedule cannot be made.
    """
    if package.recipe.feeds or len({turn.graph for turn in package.recipe.turns}) > 1:
        raise PlanError(
            "pipeline parallelism requires a job with one graph",
            where="pipeline_ranks",
            expected="a job whose graphs do not run in turns",
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
    pipeline = Pipeline(
        ranks=ranks,
        schedule=name,
        stage_ranks=homes_of_stages,
        order=order,
        buffers=dict(sorted(buffers.items())),
    )
    main_stages: Stages | None = None
    for graph, step in local.items():  # report now which graph cannot be cut
        graph_stages = cut(step, homes, len(homes_of_stages))
        main_stages = (
            graph_stages if graph == package.manifest.training_graphs()[0] else main_stages
        )
    assert main_stages is not None
    return PipelineAxis(
        pipeline,
        {name: homes.get(name, (0,)) for name in sorted(parameters | set(homes))},
        main_stages,
        microbatches,
    )


def cut_for(step: StepGraph, plan: Plan) -> Stages:
    """Cut a step graph, for one rank of the other axes, into the stages of a plan."""
    assert plan.pipeline is not None
    homes: dict[str, tuple[int, ...]] = {
        slot.parameter: bucket.stages for bucket in plan.buckets for slot in bucket.slots
    }
    homes |= {name: (stage,) for name, stage in plan.pipeline.buffers.items()}
    return cut(step, homes, len(plan.pipeline.stage_ranks))


def _stages_of(schedule: Schedule | None) -> int:
    return 2 if schedule in ("zbv", "dualpipev") else 1


def dtype_of(value: Value) -> torch.dtype:
    """Return the dtype of a value that is sent."""
    dtype: torch.dtype = getattr(torch, value.dtype)
    return dtype
