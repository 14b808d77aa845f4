"""Step graph of one rank, before sharding over the data axis and before cutting into stages."""

from __future__ import annotations

from dataclasses import dataclass

from trainload.autograd_trace.graphs import StepGraph
from trainload.sharding.plans.plan import DATA, Plan, Shard
from trainload.sharding.plans.strategies import BatchNorm, Recompute
from trainload.sharding.rewriting.batch_norm import synchronised
from trainload.sharding.rewriting.chunked_loss import chunk_losses
from trainload.sharding.rewriting.offload import offload_kept
from trainload.sharding.rewriting.recompute import recomputed
from trainload.sharding.rewriting.zero_weight import ignore_zero_weight
from trainload.sharding.tensor.partition import partition


@dataclass(frozen=True, slots=True)
class Local:
    """The options of a plan that affect a rank's step graph.

    `shards` and `positions` are what the tensor axis divides. `data_ranks` is the number of ranks
    over whose rows a batch norm is computed, and `loss_chunks` that of parts in which logits are
    computed. `offload` is the fraction of the parts of forward whose values are offloaded.
    """

    tensor_ranks: int = 1
    shards: tuple[tuple[str, Shard], ...] = ()
    batch_norm: BatchNorm = "averaged"
    recompute: Recompute = "job"
    data_ranks: int = 1
    positions: bool = False
    loss_chunks: int = 1
    offload: float = 0.0

    @classmethod
    def of(cls, plan: Plan) -> Local:
        """Return the options of a plan."""
        ranks = plan.data_ranks if plan.batch_norm == "synchronised" else 1
        shards = tuple(sorted(plan.tensor_shards.items()))
        return cls(
            plan.tensor_ranks,
            shards,
            plan.batch_norm,
            plan.recompute,
            ranks,
            plan.divide != "tensor",
            plan.loss_chunks,
            plan.offload,
        )


def local_step(step: StepGraph, axes: Local) -> StepGraph:
    """Return the step graph of a rank of the tensor axis, with its plan's batch norm statistics,
    chunks of logits, recomputation and offload.

    Args:
        step: the whole graph.
        axes: the plan's options.
    """
    if axes.tensor_ranks > 1:
        step = partition(step, axes.tensor_ranks, dict(axes.shards), positions=axes.positions).step
    return completed(step, axes)


def completed(step: StepGraph, axes: Local) -> StepGraph:
    """Apply the steps of `local_step` after the partition, to a graph that has been partitioned if
    there is a tensor axis.
    """
    if axes.data_ranks > 1:
        step = synchronised(step, axes.data_ranks, DATA)
    if axes.loss_chunks > 1:
        step = chunk_losses(step, axes.loss_chunks).step
    step = ignore_zero_weight(recomputed(step, axes.recompute))
    return offload_kept(step, axes.offload)
