"""Make plans from a package and a cluster's shape only; no cluster is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from trainload.capture.job.ambient import neutrally
from trainload.capture.program import ParameterSpec
from trainload.core.arguments import check_arguments
from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.pipeline.pipeline_axis import default_microbatches, pipe
from trainload.sharding.planner.check_plan import check_batch, no_offload, rows_of_update
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.buckets import item_bytes, make_buckets
from trainload.sharding.plans.estimate import estimate
from trainload.sharding.plans.plan import NO_ESTIMATE, Cluster, Count, Plan, Shard
from trainload.sharding.plans.strategies import (
    STRATEGIES,
    BatchNorm,
    Divide,
    Recompute,
    Schedule,
    Strategy,
)
from trainload.sharding.rewriting.local_step import Local

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters in one bucket, as in DistributedDataParallel."""
REPLICATED_BYTES = 2**30
"""Parameters, gradients and optimizer state up to this size are replicated if no strategy is
given.
"""


@neutrally
@check_arguments(PlanError)
def make_plan(
    package: Package | Source,
    cluster: Cluster,
    strategy: Strategy | None = None,
    *,
    global_batch: Count | None = None,
    accumulate: Count | None = None,
    bucket_bytes: Count = DEFAULT_BUCKET_BYTES,
    prefetch: Annotated[int, Field(ge=0)] = 1,
    shard_ranks: Count | None = None,
    tensor_ranks: Count = 1,
    tensor_rules: Mapping[str, Shard | None] | None = None,
    divide: Divide = "tensor",
    pipeline_ranks: Count = 1,
    schedule: Schedule | None = None,
    stages_per_rank: Count | None = None,
    batch_norm: BatchNorm = "averaged",
    recompute: Recompute = "job",
    loss_chunks: Count = 1,
    offload: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> Plan:
    """Make a plan that distributes a package over a cluster.

    Args:
        package: the package; a `Source` if several plans are made.
        cluster: the cluster's shape.
        strategy: strategy of the data axis. None: "single" if the axis has one rank; otherwise
            "zero0" while a replica of everything needs at most REPLICATED_BYTES, then "zero3".
        global_batch: rows of one optimizer update; None for the recipe's.
        accumulate: microbatches of one update on each rank of the data axis; None for one, or, with
            a pipeline, up to twice its ranks.
        bucket_bytes: bytes of parameters in one bucket; a bucket ends with the parameter that
            reaches it.
        prefetch: number of buckets by which a bucket's gather precedes its use.
        shard_ranks: for "hybrid", the number of ranks of the data axis that share one copy; None
            for those of a node.
        tensor_ranks: number of adjacent ranks that divide the work on the same rows.
        tensor_rules: pattern of parameter names (as in a shell) -> how the tensor axis divides
            them; None to leave them whole. The division of parameters that match no pattern is
            found from the graph.
        divide: what the tensor axis divides, as documented in `Plan`.
        pipeline_ranks: number of ranks that a microbatch passes through, one after the other.
        schedule: schedule of the pipeline; None for "1f1b".
        stages_per_rank: stages of each pipeline rank; None for two with V-shaped schedules,
            otherwise one.
        batch_norm: statistics that a batch norm uses, and handling of the running ones, as
            documented in `Plan`.
        recompute: forward values that are recomputed for backward, as documented in `Plan`.
        loss_chunks: number of parts of a call's rows in which logits are computed.
        offload: fraction of the parts of forward whose values are in the host's memory until
            backward, as documented in `Plan`. Not with a pipeline.

    Raises:
        PlanError: no such plan can be made; the message says what would be possible.

    Example:
        cluster = trainload.Cluster(nodes=2, devices_per_node=8)
        plan = trainload.plan(package, cluster, "zero1", global_batch=256, tensor_ranks=2)
    """
    source = package if isinstance(package, Source) else Source(package)
    package = source.package
    world = cluster.world_size
    rows = rows_of_update(package, global_batch)
    lanes = _data_ranks(
        cluster, tensor_ranks, tensor_rules, divide, pipeline_ranks, schedule, stages_per_rank
    )
    if accumulate is None:
        accumulate = (
            1
            if pipeline_ranks == 1
            else default_microbatches(rows // lanes, pipeline_ranks, schedule, stages_per_rank)
        )
    check_batch(package, rows, lanes, accumulate)
    tensor, pipeline = source.tensor(tensor_ranks, tensor_rules, divide), None
    owners = [
        replace(p, shape=tensor.shape(p.name, p.shape))
        for p in package.parameters
        if p.alias_of is None
    ]
    shards = tuple(sorted(tensor.shards.items()))
    together = lanes if batch_norm == "synchronised" else 1
    axes = Local(
        tensor_ranks,
        shards,
        batch_norm,
        recompute,
        together,
        divide != "tensor",
        loss_chunks,
        offload,
    )
    if loss_chunks > 1:
        source.check_chunks(axes)
    if offload:
        if pipeline_ranks > 1:
            raise no_offload(offload, pipeline_ranks)
        source.check_offload(axes)
    if pipeline_ranks > 1:
        local = source.local(axes)
        pipeline = pipe(
            package, source.training, local, pipeline_ranks, schedule, stages_per_rank, accumulate
        )
    strategy = strategy or _default_strategy(owners, source, lanes)
    if strategy == "single" and lanes > 1:
        raise PlanError(
            (
                "the strategy single requires one device, but the cluster has more"
                if lanes == world
                else "the strategy single requires a data axis of one rank"
            ),
            where="strategy",
            expected=f"one of {', '.join(STRATEGIES[1:])}",
            got=f"single for {lanes} {'devices' if lanes == world else 'ranks'}",
        )
    shard_ranks = _shard_ranks(strategy, cluster, lanes, tensor_ranks, shard_ranks)
    bad = sorted({p.dtype for p in owners if not _is_floating(p.dtype)})
    if bad:
        raise PlanError(
            "the package has parameters that are not floating point",
            where="package",
            got=", ".join(bad),
        )
    stages = None if pipeline is None else pipeline.homes
    buckets = make_buckets(
        owners,
        source.trained,
        source.order,
        world,
        bucket_bytes,
        source.whole,
        tensor.shards,
        stages,
    )
    draft = Plan(
        package=package.digest,
        cluster=cluster,
        strategy=strategy,
        shard_ranks=shard_ranks,
        tensor_ranks=tensor_ranks,
        tensor_shards=dict(sorted(tensor.shards.items())),
        divide=divide,
        replicated=tensor.replicated,
        pipeline=None if pipeline is None else pipeline.pipeline,
        batch_norm=batch_norm,
        recompute=recompute,
        loss_chunks=loss_chunks,
        offload=offload,
        global_batch=rows,
        accumulate=accumulate,
        prefetch=prefetch,
        buckets=buckets,
        estimate=NO_ESTIMATE,
    )
    sent = 0 if pipeline is None else pipeline.sent(draft.rows_per_call)
    return draft.model_copy(
        update={"estimate": estimate(draft, package, tensor.sent(draft.rows_per_call) + sent)}
    )


plan = make_plan
"""Name of `make_plan` in `trainload`."""


def _default_strategy(owners: Sequence[ParameterSpec], source: Source, lanes: int) -> Strategy:
    if lanes == 1:
        return "single"
    copies = {
        p.name: 2 + 2 * len(source.trained[p.name]) if p.name in source.trained else 1
        for p in owners
    }
    everything = sum(math.prod(p.shape) * item_bytes(p.dtype) * copies[p.name] for p in owners)
    return "zero0" if everything <= REPLICATED_BYTES else "zero3"


def _data_ranks(
    cluster: Cluster,
    tensor_ranks: int,
    rules: Mapping[str, Shard | None] | None,
    divide: Divide,
    pipeline_ranks: int,
    schedule: Schedule | None,
    stages_per_rank: int | None,
) -> int:
    """Return the number of ranks that the other axes leave for the data axis."""
    remaining, spelled = cluster.world_size, f"the cluster's {cluster.world_size} devices"
    for name, ranks in (("tensor", tensor_ranks), ("pipeline", pipeline_ranks)):
        if remaining % ranks:
            raise PlanError(
                f"the {name} axis does not divide the cluster",
                where=f"{name}_ranks",
                expected=f"a divisor of {spelled}",
                got=str(ranks),
            )
        remaining //= ranks
        spelled = f"the {remaining} devices that the tensor axis leaves" if ranks > 1 else spelled
    if rules and tensor_ranks == 1:
        raise PlanError(
            "tensor rules have no effect on a tensor axis of one rank",
            where="tensor_rules",
            hint="Set tensor_ranks (--tensor).",
        )
    if divide != "tensor" and tensor_ranks == 1:
        raise PlanError(
            "a tensor axis of one rank divides nothing",
            where="divide",
            got=divide,
            hint="Set tensor_ranks.",
        )
    if pipeline_ranks == 1 and (schedule is not None or stages_per_rank is not None):
        raise PlanError(
            "a schedule has no effect on a pipeline of one rank",
            where="schedule",
            hint="Set pipeline_ranks (--pipeline).",
        )
    return remaining


def _shard_ranks(
    strategy: Strategy, cluster: Cluster, lanes: int, tensor_ranks: int, requested: int | None
) -> int | None:
    if strategy != "hybrid":
        if requested is not None:
            raise PlanError(
                "this option requires the strategy hybrid", where="shard_ranks", got=strategy
            )
        return None
    ranks = (
        min(lanes, max(1, cluster.devices_per_node // tensor_ranks))
        if requested is None
        else requested
    )
    if lanes % ranks or ranks < min(2, lanes):
        raise PlanError(
            "this number of ranks cannot share one copy of the model",
            where="shard_ranks",
            expected=(
                f"a divisor of the {'cluster' if lanes == cluster.world_size else 'data axis'}'s"
                f" {lanes} devices, at least 2"
            ),
            got=str(ranks),
            hint="Choose shard_ranks (--strategy hybrid/N), or zero0, which shards nothing.",
        )
    return ranks


def _is_floating(dtype: str) -> bool:
    return dtype in ("float32", "float64", "float16", "bfloat16")
