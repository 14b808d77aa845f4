"""The same training on another cluster: a plan as like another one as the cluster allows, with the same global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainload.core.errors import PlanError
from trainload.packaging.package import Package
from trainload.sharding.planner.check_plan import check_batch, rows_of_update
from trainload.sharding.planner.make_plan import make_plan
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.plans.plan import Cluster, Plan
from trainload.sharding.plans.strategies import Strategy


def replan(
    package: Package | Source, plan: Plan, cluster: Cluster, strategy: Strategy | None = None, *, accumulate: int | None = None
) -> Plan:
    """A plan for another cluster that keeps of a plan what it can: strategy, axes, buckets read ahead, what is computed again.

    Args:
        package: what is trained.
        plan: the one that it takes the place of.
        cluster: the other cluster.
        strategy: another one for the data axis; None: the plan's, where it has several ranks.
        accumulate: microbatches of an update; None: as `make_plan` chooses.

    Raises:
        PlanError: as `make_plan`.
    """
    world = cluster.world_size
    kept = strategy or (None if world == 1 or plan.strategy == "single" else plan.strategy)
    ranks = plan.shard_ranks if kept == "hybrid" and world % (plan.shard_ranks or 1) == 0 else None
    tensor = plan.tensor_ranks if world % plan.tensor_ranks == 0 else 1
    divide = plan.divide if tensor > 1 else "tensor"
    pipeline = plan.pipeline if world // tensor % plan.pipeline_ranks == 0 else None
    return make_plan(
        package,
        cluster,
        kept,
        global_batch=plan.global_batch,
        accumulate=accumulate,
        prefetch=plan.prefetch,
        shard_ranks=ranks,
        tensor_ranks=tensor,
        tensor_rules=dict(plan.tensor_shards) if tensor > 1 and divide in ("tensor", "sequence") else None,
        divide=divide,
        batch_norm=plan.batch_norm,
        recompute=plan.recompute,
        pipeline_ranks=1 if pipeline is None else pipeline.ranks,
        schedule=None if pipeline is None else pipeline.schedule,
        stages_per_rank=None if pipeline is None else len(pipeline.stage_ranks) // pipeline.ranks,
    )


def plans_of_sizes(package: Package, plan: Plan, sizes: Sequence[int]) -> tuple[Plan, ...]:
    """A plan for each number of nodes that one can be made for, fewest first: what a run needs whose cluster grows and shrinks.

    All have the global batch, and so the losses, of `plan`, its tensor and pipeline axes, and at most its rows in one call: fewer ranks
    have more microbatches.

    Args:
        package: what is trained.
        plan: for one of the sizes, or any other; its nodes' devices are those of all.
        sizes: numbers of nodes.

    Raises:
        PlanError: none of them fits; it says why, one by one.
    """
    found: list[Plan] = []
    why: dict[int, PlanError] = {}
    source = Source(package)
    for nodes in sorted(set(sizes)):
        cluster = plan.cluster.model_copy(update={"nodes": nodes})
        if cluster == plan.cluster:
            found.append(plan)
            continue
        try:
            found.append(_of_size(source, plan, cluster))
        except PlanError as error:
            why[nodes] = error
    if not found:
        raise _no_size(why, plan.cluster.devices_per_node)
    return tuple(found)


def largest_size(
    package: Package, sizes: Sequence[int], devices: int, *, global_batch: int | None = None, accumulate: int | None = None
) -> int:
    """The greatest number of nodes among which the global batch divides, so that `make_plan` can plan for it: the others' plans are made
    from that one (`plans_of_sizes`).

    Args:
        package: what is trained.
        sizes: numbers of nodes.
        devices: of each node, every one of which has rows of its own.
        global_batch: rows of one optimizer update; None: the recipe's.
        accumulate: microbatches of one update; None: one.

    Raises:
        PlanError: none of them fits; it says why, one by one.
    """
    rows = rows_of_update(package, global_batch)
    why: dict[int, PlanError] = {}
    for nodes in sorted(set(sizes), reverse=True):
        try:
            check_batch(package, rows, nodes * devices, 1 if accumulate is None else accumulate)
        except PlanError as error:
            why[nodes] = error
        else:
            return nodes
    raise _no_size(why, devices)


def _no_size(why: Mapping[int, PlanError], devices: int) -> PlanError:
    """What is said of numbers of nodes none of which fits. why: what is wrong with each."""
    return PlanError(
        "no number of nodes fits",
        where=f"{min(why)} to {max(why)} nodes of {devices} devices",
        got="; ".join(f"{nodes}: {why[nodes].problem}" for nodes in sorted(why)),
        hint="The rows of the global batch must divide among the ranks: choose other sizes, or launch with --set global_batch=N.",
    )


def _of_size(source: Source, plan: Plan, cluster: Cluster) -> Plan:
    together = plan.tensor_ranks * plan.pipeline_ranks
    if cluster.world_size % together:
        raise PlanError(f"{cluster.world_size} ranks do not divide into groups of {together}, which the plan's axes have")
    lanes = cluster.world_size // together
    for accumulate in range(plan.accumulate, plan.global_batch + 1):
        if plan.global_batch % (lanes * accumulate) == 0 and plan.global_batch // (lanes * accumulate) <= plan.rows_per_call:
            return replan(source, plan, cluster, accumulate=accumulate)
    if plan.global_batch % lanes == 0:
        return replan(source, plan, cluster, accumulate=plan.global_batch // lanes)
    raise PlanError(f"{plan.global_batch} rows do not divide among {lanes} ranks")
