"""Estimate a plan's memory and communication for one rank, in bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainload.packaging.package import Package
from trainload.sharding.plans.buckets import item_bytes
from trainload.sharding.plans.plan import Bucket, Estimate, Plan


def estimate(plan: Plan, package: Package, between: float = 0) -> Estimate:
    """Return the memory and communication of a rank of a plan; for a pipeline, the maximum over its
    ranks.

    The plan's own estimate is ignored.

    Args:
        plan: distribution of the package.
        package: the package.
        between: bytes that a rank sends on the tensor and pipeline axes for one microbatch.
    """
    ranks = [of_rank(plan, package, index) for index in range(plan.pipeline_ranks)]
    worst = {name: max(getattr(each, name) for each in ranks) for name in Estimate.model_fields}
    return Estimate(
        **worst
        | {
            "communication_bytes_per_step": worst["communication_bytes_per_step"]
            + round(plan.accumulate * between)
        }
    )


def of_rank(plan: Plan, package: Package, pipeline_index: int) -> Estimate:
    """Return the estimate for the ranks at one place of the pipeline, without communication on the
    tensor and pipeline axes.
    """
    buckets = plan.held_buckets(pipeline_index)
    states, own_state = state_counts(package), own_state_bytes(package)
    shard, replicas = plan.shard_degree, plan.replicas
    parameters = gradients = optimizer = communication = gathered = 0
    full: list[int] = []
    for bucket in buckets:
        size = bucket.length * item_bytes(bucket.dtype)
        ring = size * (shard - 1) // shard
        full.append(size)
        parameters += size // shard if plan.shards_parameters else size
        if plan.shards_parameters:
            communication += 2 * ring * plan.accumulate
        if not bucket.groups:
            continue
        part = size // shard if plan.shards_state else size
        gradients += part
        if plan.accumulate > 1 and plan.shards_state and not plan.shards_gradients:
            gradients += size  # between microbatches a rank holds its own sum of the whole gradient
        optimizer += kept_per_element(bucket, states, package.recipe.keeps_mean) * part
        for group in bucket.whole:
            optimizer += own_state[group] * len(bucket.slots)
            if shard > 1:
                copies = 2 + states[group]
                gathered = max(gathered, copies * size)
                communication += copies * ring
        communication += (
            ring * plan.accumulate if plan.shards_gradients else ring if plan.shards_state else 0
        )
        if plan.shards_state and not plan.shards_parameters:
            communication += ring  # the updated parameters
        communication += 2 * (part * (replicas - 1) // replicas)
        holders = len(plan.holders(bucket))
        communication += 2 * (part * (holders - 1) // holders)
    if plan.shards_parameters:
        gathered = max(
            [gathered, *(sum(full[i : i + plan.prefetch + 1]) for i in range(len(full)))]
        )
    return Estimate(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        gathered_bytes=gathered,
        communication_bytes_per_step=communication,
    )


def state_counts(package: Package) -> dict[str, int]:
    """Return optimizer group -> number of state values that a run keeps for each element of a
    parameter.
    """
    return {u.group: sum(s.like_parameter for s in u.state) for u in package.manifest.updates}


def kept_per_element(bucket: Bucket, states: Mapping[str, int], mean: bool) -> int:
    """Return the number of values that a run keeps for each parameter element of a bucket:
    optimizer state and running mean.
    """
    return sum(states[group] for group in bucket.groups) + (mean and bool(bucket.groups))


def own_state_bytes(package: Package) -> dict[str, int]:
    """Return optimizer group -> bytes of the state that does not have its parameter's shape; every
    rank holds all of it.
    """
    return {
        u.group: sum(
            math.prod(s.shape) * item_bytes(s.dtype) for s in u.state if not s.like_parameter
        )
        for u in package.manifest.updates
    }
