"""A step graph as one rank has it, before anything is sharded over the data axis or cut into stages."""

from __future__ import annotations

from dataclasses import dataclass

from trainload.autograd_trace.graphs import StepGraph
from trainload.sharding.plans.plan import DATA, Plan, Shard
from trainload.sharding.plans.strategies import BatchNorm, Recompute
from trainload.sharding.rewriting.batch_norm import synchronised
from trainload.sharding.rewriting.recompute import recomputed
from trainload.sharding.rewriting.zero_weight import ignore_zero_weight
from trainload.sharding.tensor.partition import partition


@dataclass(frozen=True, slots=True)
class Local:
    """What of a plan shapes a rank's step graph. `shards`, `positions`: what the tensor axis divides. `data_ranks`: whose rows a batch norm
    takes.
    """

    tensor_ranks: int = 1
    shards: tuple[tuple[str, Shard], ...] = ()
    batch_norm: BatchNorm = "averaged"
    recompute: Recompute = "job"
    data_ranks: int = 1
    positions: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Local:
        """A plan's."""
        ranks = plan.data_ranks if plan.batch_norm == "synchronised" else 1
        shards = tuple(sorted(plan.tensor_shards.items()))
        return cls(plan.tensor_ranks, shards, plan.batch_norm, plan.recompute, ranks, plan.divide != "tensor")


def local_step(step: StepGraph, axes: Local) -> StepGraph:
    """Return the step graph of a rank of the tensor axis, with the statistics and the recomputation that its plan wants.

    Args:
        step: the whole graph.
        axes: the plan's.
    """
    if axes.tensor_ranks > 1:
        step = partition(step, axes.tensor_ranks, dict(axes.shards), positions=axes.positions).step
    return completed(step, axes)


def completed(step: StepGraph, axes: Local) -> StepGraph:
    """Apply what `local_step` applies after the partition, to a graph that has been partitioned if there is a tensor axis."""
    if axes.data_ranks > 1:
        step = synchronised(step, axes.data_ranks, DATA)
    return ignore_zero_weight(recomputed(step, axes.recompute))
