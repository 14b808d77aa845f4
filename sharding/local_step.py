"""A step graph as one rank has it, before anything is sharded over the data axis or cut into stages."""

from __future__ import annotations

from dataclasses import dataclass

from trainload.autograd_trace.graphs import StepGraph
from trainload.sharding.batch_norm import synchronised
from trainload.sharding.plan import DATA, Plan, Shard
from trainload.sharding.recompute import recomputed
from trainload.sharding.strategies import BatchNorm, Recompute
from trainload.sharding.tensor.partition import partition


@dataclass(frozen=True, slots=True)
class Local:
    """What of a plan shapes a rank's step graph. `shards`: of the tensor axis. `data_ranks`: whose rows a batch norm takes."""

    tensor_ranks: int = 1
    shards: tuple[tuple[str, Shard], ...] = ()
    batch_norm: BatchNorm = "averaged"
    recompute: Recompute = "job"
    data_ranks: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Local:
        """A plan's."""
        ranks = plan.data_ranks if plan.batch_norm == "synchronised" else 1
        return cls(plan.tensor_ranks, tuple(sorted(plan.tensor_shards.items())), plan.batch_norm, plan.recompute, ranks)


def local_step(step: StepGraph, axes: Local) -> StepGraph:
    """The step graph of a rank of the tensor axis, with the statistics and the recomputation that its plan wants.

    Args:
        step: the whole graph.
        axes: the plan's.
    """
    if axes.tensor_ranks > 1:
        step = partition(step, axes.tensor_ranks, dict(axes.shards)).step
    if axes.data_ranks > 1:
        step = synchronised(step, axes.data_ranks, DATA)
    return recomputed(step, axes.recompute)
