"""Plan the same training for another cluster, with the same global batch and as few changes as the
cluster allows.
"""

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
    package: Package | Source,
    plan: Plan,
    cluster: Cluster,
    strategy: Strategy | None = None,
    *,
    accumulate: int | None = None,
) -> Plan:
    """Return a plan for another cluster that keeps the strategy, the axes, the prefetch and the
    recomputation where possible.

    Args:
        package: the package.
        plan: the plan to replace.
        cluster: the other cluster.
        strategy: another one for the data axis; None for the plan's, if the axis has several ranks.
        accumulate: microbatches of an update; None to let `make_plan` choose.

    Raises:
        PlanError: as for `make_plan`.
    """
    world = cluster.world_size
    new_strategy = strategy or (None if world == 1 or plan.strategy == "single" else plan.strategy)
    ranks = (
        plan.shard_ranks
        if new_strategy == "hybrid" and world % (plan.shard_ranks or 1) == 0
        else None
    )
    tensor = plan.tensor_ranks if world % plan.tensor_ranks == 0 else 1
    divide = plan.divide if tensor > 1 else "tensor"
    pipeline = plan.pipeline if world // tensor % plan.pipeline_ranks == 0 else None
    return make_plan(
        package,
        cluster,
        new_strategy,
        global_batch=plan.global_batch,
        accumulate=accumulate,
        prefetch=plan.prefetch,
        shard_ranks=ranks,
        tensor_ranks=tensor,
        tensor_rules=(
            dict(plan.tensor_shards) if tensor > 1 and divide in ("tensor", "sequence") else None
        ),
        divide=divide,
        batch_norm=plan.batch_norm,
        recompute=plan.recompute,
        loss_chunks=plan.loss_chunks,
        offload=plan.offload,
        pipeline_ranks=1 if pipeline is None else pipeline.ranks,
        schedule=None if pipeline is None else pipeline.schedule,
        stages_per_rank=None if pipeline is None else len(pipeline.stage_ranks) // pipeline.ranks,
    )


def plans_of_sizes(package: Package, plan: Plan, sizes: Sequence[int]) -> tuple[Plan, ...]:
    """Return a plan for each feasible number of nodes, smallest first, for a run whose cluster
    grows and shrinks.

    All have the global batch, and therefore the losses, of `plan`, its tensor and pipeline axes,
    and at most its rows in one call: fewer ranks have more microbatches.

    Args:
        package: the package.
        plan: a plan for one of the sizes or any other; the number of devices per node is the same
            for all.
        sizes: numbers of nodes.

    Raises:
        PlanError: no size is feasible; the message gives the reason for each.
    """
    plans: list[Plan] = []
    why: dict[int, PlanError] = {}
    source = Source(package)
    for nodes in sorted(set(sizes)):
        cluster = plan.cluster.model_copy(update={"nodes": nodes})
        if cluster == plan.cluster:
            plans.append(plan)
            continue
        try:
            plans.append(_of_size(source, plan, cluster))
        except PlanError as error:
            why[nodes] = error
    if not plans:
        raise _no_size(why, plan.cluster.devices_per_node)
    return tuple(plans)


def largest_size(
    package: Package,
    sizes: Sequence[int],
    devices: int,
    *,
    global_batch: int | None = None,
    accumulate: int | None = None,
) -> int:
    """Return the greatest number of nodes among which the global batch can be divided, so that
    `make_plan` can plan for it.

    The plans for other sizes are made from that one (`plans_of_sizes`).

    Args:
        package: the package.
        sizes: numbers of nodes.
        devices: devices of each node, each with its own rows.
        global_batch: rows of one optimizer update; None for the recipe's.
        accumulate: microbatches of one update; None for one.

    Raises:
        PlanError: no size is feasible; the message gives the reason for each.
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
    """Return the error for numbers of nodes of which none is feasible. `why`: number of nodes ->
    its error.
    """
    return PlanError(
        "no number of nodes is feasible",
        where=f"{min(why)} to {max(why)} nodes of {devices} devices",
        got="; ".join(f"{nodes}: {why[nodes].problem}" for nodes in sorted(why)),
        hint=(
            "The global batch must be divisible by the number of ranks: choose other sizes, or"
            " launch with --set global_batch=N."
        ),
    )


def _of_size(source: Source, plan: Plan, cluster: Cluster) -> Plan:
    together = plan.tensor_ranks * plan.pipeline_ranks
    if cluster.world_size % together:
        raise PlanError(
            f"{cluster.world_size} ranks cannot be divided into groups of {together}, as the plan's"
            " axes require"
        )
    lanes = cluster.world_size // together
    for accumulate in range(plan.accumulate, plan.global_batch + 1):
        if (
            plan.global_batch % (lanes * accumulate) == 0
            and plan.global_batch // (lanes * accumulate) <= plan.rows_per_call
        ):
            return replan(source, plan, cluster, accumulate=accumulate)
    if plan.global_batch % lanes == 0:
        return replan(source, plan, cluster, accumulate=plan.global_batch // lanes)
    raise PlanError(f"{plan.global_batch} rows cannot be divided evenly among {lanes} ranks")
