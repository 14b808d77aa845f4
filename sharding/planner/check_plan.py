"""Check that a plan fits its package, whoever made or edited it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainload.capture.guard import limits_text
from trainload.core.errors import PlanError
from trainload.packaging.format.entries import graph_guard
from trainload.packaging.package import Package
from trainload.sharding.pipeline.stage_schedule import instructions
from trainload.sharding.plans.plan import Plan


def rows_of_update(package: Package, global_batch: int | None) -> int:
    """Return the number of rows of one optimizer update: `global_batch`, or the recipe's if it is
    None.
    """
    return package.recipe.global_batch if global_batch is None else global_batch


def check_plan(plan: Plan, package: Package) -> None:
    """Check that a plan is for this package.

    Raises:
        PlanError: it was made for another package, or was edited so that it no longer fits.
    """
    digests = {package.digest, package.manifest.parent}
    if plan.package not in digests:
        raise PlanError(
            "the plan is for another package",
            where="plan.package",
            expected=package.digest,
            got=plan.package,
            hint="Make a plan for this package: trainload plan.",
        )
    shapes = _share_shapes(
        plan, {p.name: tuple(p.shape) for p in package.manifest.parameters if p.alias_of is None}
    )
    owners = groups_of(package)
    whole = {u.group for u in package.manifest.updates if not u.elementwise}
    placed: dict[str, tuple[int, ...]] = {}
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            if slot.parameter in placed:
                raise PlanError(
                    "a parameter is placed twice",
                    where=f"plan.buckets: {bucket.name}",
                    got=slot.parameter,
                )
            if slot.offset < end or slot.length != math.prod(slot.shape):
                raise PlanError(
                    "slots overlap or have the wrong length",
                    where=f"plan.buckets: {bucket.name}: {slot.parameter}",
                )
            groups = owners.get(slot.parameter, ())
            if (bucket.groups, bucket.whole) != (groups, tuple(g for g in groups if g in whole)):
                raise PlanError(
                    "a parameter is in the bucket of another update",
                    where=f"plan.buckets: {bucket.name}: {slot.parameter}",
                    expected=", ".join(groups) or "none",
                    got=", ".join(bucket.groups) or "none",
                )
            if bucket.divided and bucket.whole:
                raise PlanError(
                    "the tensor axis divides a parameter whose optimizer needs it whole",
                    where=f"plan.buckets: {bucket.name}: {slot.parameter}",
                    got=f"groups {', '.join(bucket.whole)}",
                )
            if bucket.divided != (slot.parameter in plan.tensor_shards):
                raise PlanError(
                    "a bucket mixes parameters that the tensor axis divides with others",
                    where=f"plan.buckets: {bucket.name}: {slot.parameter}",
                    expected=f"divided: {slot.parameter in plan.tensor_shards}",
                    got=f"divided: {bucket.divided}",
                )
            placed[slot.parameter] = tuple(slot.shape)
            end = slot.offset + slot.length
        if bucket.length < end or bucket.length % plan.world_size:
            raise PlanError(
                "a bucket's length cannot be divided evenly",
                where=f"plan.buckets: {bucket.name}",
                got=str(bucket.length),
                expected=f"a multiple of {plan.world_size} of at least {end}",
            )
    if placed != shapes:
        wrong = min(set(placed.items()) ^ set(shapes.items()))[0]
        raise PlanError(
            "the buckets do not match the package's parameters",
            where=f"plan.buckets: {wrong}",
            expected=str(shapes.get(wrong, "no such parameter")),
            got=str(placed.get(wrong, "none")),
        )
    check_batch(package, plan.global_batch, plan.data_ranks, plan.accumulate)
    if plan.pipeline is not None:
        instructions(plan.pipeline.order, plan.pipeline.stage_ranks, plan.accumulate)


def _share_shapes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that slots must have.

    Raises:
        PlanError: the tensor axis divides an unknown parameter, or one that it cannot divide.
    """
    share_shapes = dict(shapes)
    for name, shard in plan.tensor_shards.items():
        where = f"plan.tensor_shards: {name}"
        if name not in shapes:
            raise PlanError(
                "the tensor axis divides a parameter that the package lacks", where=where
            )
        shape, ranks = shapes[name], plan.tensor_ranks
        if not shard.divides(shape, ranks):
            raise PlanError(
                "the tensor axis cannot divide a parameter this way",
                where=where,
                expected=(
                    f"a dim of {shape} that is a multiple of {shard.blocks} blocks x {ranks} ranks"
                ),
                got=str(shard),
            )
        share_shapes[name] = shard.share_shape(shape, ranks)
    return share_shapes


def groups_of(package: Package) -> dict[str, tuple[str, ...]]:
    """Return parameter -> its groups, in the recipe's order."""
    groups: dict[str, tuple[str, ...]] = {}
    for group in package.recipe.groups:
        for name in group.parameters:
            groups[name] = (*groups.get(name, ()), group.name)
    return groups


def check_batch(package: Package, rows: int, world: int, accumulate: int) -> None:
    """Check that a global batch of `rows` rows can be split into `accumulate` calls on each of
    `world` ranks with different rows.

    Raises:
        PlanError: it cannot.
    """
    calls = world * accumulate
    if rows % calls:
        raise PlanError(
            "the global batch cannot be split evenly",
            where="global_batch",
            expected=f"a multiple of {world} workers x {accumulate} microbatches",
            got=str(rows),
            hint=(
                f"Use a global batch of {max(1, rows // calls) * calls} (launch --set"
                " global_batch=N), or another number of workers."
            ),
        )
    for entry in (
        i
        for name in package.manifest.training_graphs()
        for i in package.manifest.graphs[name].inputs
    ):
        if isinstance(entry.shape[0], int) and entry.shape[0] != rows // calls:
            raise PlanError(
                "the job was frozen with a static batch dim",
                where=f"input {entry.name}",
                expected=f"{entry.shape[0]} rows per call",
                got=f"{rows // calls}",
                hint=(
                    "Change the global batch, workers or accumulation to match, or freeze with a"
                    " dynamic batch dim."
                ),
            )
    for name in package.manifest.training_graphs():
        guard = graph_guard(package.manifest.graphs[name])
        least, most = guard.ranges.get(str(guard.inputs[0].sizes[0]), (0, None))
        if rows // calls < least or (most is not None and rows // calls > most):
            raise PlanError(
                "the graph does not accept this number of rows per call",
                where=f"graph {name}",
                expected=f"{limits_text(least, most)} rows",
                got=f"{rows // calls}",
                hint=(
                    "Change the global batch, workers or accumulation to match, or freeze with"
                    " another range of the batch dim."
                ),
            )


def no_offload(offload: float, pipeline_ranks: int) -> PlanError:
    """Return the error of a plan that would offload values in a pipeline."""
    return PlanError(
        "values cannot be offloaded in a pipeline",
        where="offload",
        got=f"{offload:g} with {pipeline_ranks} pipeline ranks",
        hint="Leave offload at 0, or plan without a pipeline.",
    )
