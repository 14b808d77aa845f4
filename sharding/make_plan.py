"""Makes plans: from a package and a cluster's shape alone, without a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from trainload.capture.errors import PlanError
from trainload.capture.guards import limits_text
from trainload.capture.program import GraphCapture
from trainload.packaging.entries import graph_guard
from trainload.packaging.read import Package
from trainload.sharding.buckets import item_bytes, make_buckets
from trainload.sharding.estimate import estimate
from trainload.sharding.plan import Cluster, Estimate, Plan, Shard
from trainload.sharding.strategies import STRATEGIES, Strategy
from trainload.sharding.tensor.axis import TensorAxis, divide

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Of parameters in one bucket; as DistributedDataParallel's default."""
REPLICATED_BYTES = 2**30
"""Parameters, gradients and optimizer state up to this size are replicated where no strategy is asked for."""


def make_plan(
    package: Package,
    cluster: Cluster,
    strategy: Strategy | None = None,
    *,
    global_batch: int | None = None,
    accumulate: int = 1,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    prefetch: int = 1,
    shard_ranks: int | None = None,
    tensor_ranks: int = 1,
    tensor_rules: Mapping[str, Shard | None] | None = None,
) -> Plan:
    """Spreads a package over a cluster.

    Args:
        package: what is to be trained.
        cluster: the cluster's shape.
        strategy: of the data axis. None: "single" where it has one rank; else "zero0" while a replica of everything takes up to
            REPLICATED_BYTES, then "zero3".
        global_batch: rows of one optimizer update; None: the recipe's.
        accumulate: microbatches of one update on each rank.
        bucket_bytes: bytes of parameters in one bucket; a bucket ends with the parameter that reaches it.
        prefetch: how many buckets ahead of its use a bucket's gather starts.
        shard_ranks: for "hybrid": how many ranks of the data axis share one copy; None: those of a node.
        tensor_ranks: how many neighbours divide the work on the same rows.
        tensor_rules: pattern of parameter names (as in a shell) -> how the tensor axis divides them; None: not. What no pattern fits is
            found from the graph.

    Raises:
        PlanError: no such plan can be made; the message says what would do.
    """
    world = cluster.world_size
    rows = global_batch or package.recipe.global_batch
    lanes = _data_ranks(cluster, tensor_ranks, tensor_rules)
    _check_batch(package, rows, lanes, accumulate)
    manifest = package.manifest
    groups_of = _groups_of(package)
    owners = [p for p in package.parameters if p.alias_of is None]
    whole = {u.group for u in manifest.updates if not u.elementwise}
    tensor = TensorAxis(tensor_ranks, {})
    if tensor_ranks > 1:
        tensor = divide(package, tensor_ranks, {name for name, groups in groups_of.items() if whole.intersection(groups)}, tensor_rules)
        owners = [replace(p, shape=tensor.shape(p.name, p.shape)) for p in owners]
    if strategy is None:
        everything = sum(
            math.prod(p.shape) * item_bytes(p.dtype) * (2 + 2 * len(groups_of[p.name]) if p.name in groups_of else 1) for p in owners
        )
        strategy = "single" if lanes == 1 else "zero0" if everything <= REPLICATED_BYTES else "zero3"
    if strategy == "single" and lanes > 1:
        raise PlanError(
            "one device was asked for, and the cluster has more" if tensor_ranks == 1 else "the data axis has more than one rank",
            where="strategy",
            expected=f"one of {', '.join(STRATEGIES[1:])}",
            got=f"single for {lanes} {'devices' if tensor_ranks == 1 else 'ranks'}",
        )
    shard_ranks = _shard_ranks(strategy, cluster, lanes, tensor_ranks, shard_ranks)
    bad = sorted({p.dtype for p in owners if not _is_floating(p.dtype)})
    if bad:
        raise PlanError("the package has parameters that are not floating point", where="package", got=", ".join(bad))
    order = [name for graph in manifest.training_graphs() for name in parameter_order(package.captured(graph))]
    aliases = {p.name: p.alias_of for p in manifest.parameters if p.alias_of is not None}
    uses = list(dict.fromkeys(aliases.get(n) or n for n in order))
    buckets = make_buckets(owners, groups_of, uses, world, bucket_bytes, whole, tensor.shards)
    made = Plan(
        package=package.digest,
        cluster=cluster,
        strategy=strategy,
        shard_ranks=shard_ranks,
        tensor_ranks=tensor_ranks,
        tensor_shards=dict(sorted(tensor.shards.items())),
        global_batch=rows,
        accumulate=accumulate,
        prefetch=prefetch,
        buckets=buckets,
        estimate=_NOTHING,
    )
    return made.model_copy(update={"estimate": estimate(made, package, tensor.sent(made.rows_per_call))})


_NOTHING = Estimate(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0, gathered_bytes=0, communication_bytes_per_step=0)


def _data_ranks(cluster: Cluster, tensor_ranks: int, rules: Mapping[str, Shard | None] | None) -> int:
    if cluster.world_size % tensor_ranks:
        raise PlanError(
            "the tensor axis does not divide the cluster",
            where="tensor_ranks",
            expected=f"a divisor of the cluster's {cluster.world_size} devices",
            got=str(tensor_ranks),
        )
    if rules and tensor_ranks == 1:
        raise PlanError("there are rules for a tensor axis of one rank", where="tensor_rules", cure="Give tensor_ranks (--tensor).")
    return cluster.world_size // tensor_ranks


def _shard_ranks(strategy: Strategy, cluster: Cluster, lanes: int, tensor_ranks: int, given: int | None) -> int | None:
    if strategy != "hybrid":
        if given is not None:
            raise PlanError("a number of ranks that share one copy goes with the strategy hybrid", where="shard_ranks", got=strategy)
        return None
    ranks = max(1, cluster.devices_per_node // tensor_ranks) if given is None else given
    if lanes % ranks or ranks < min(2, lanes):
        raise PlanError(
            "so many ranks cannot share one copy",
            where="shard_ranks",
            expected=f"a divisor of the {'cluster' if tensor_ranks == 1 else 'data axis'}'s {lanes} devices, at least 2",
            got=str(ranks),
            cure="Choose shard_ranks (--shard-ranks), or zero0, which shards nothing.",
        )
    return ranks


def _groups_of(package: Package) -> dict[str, tuple[str, ...]]:
    """Parameter -> its groups, in the recipe's order."""
    found: dict[str, tuple[str, ...]] = {}
    for group in package.recipe.groups:
        for name in group.parameters:
            found[name] = (*found.get(name, ()), group.name)
    return found


def check_plan(plan: Plan, package: Package) -> None:
    """Demands that a plan is for this package.

    Raises:
        PlanError: it was made for another package, or was edited so that it no longer fits.
    """
    known = {package.digest, package.manifest.parent}
    if plan.package not in known:
        raise PlanError(
            "the plan is for another package",
            where="plan.package",
            expected=package.digest,
            got=plan.package,
            cure="Make a plan for this package: trainload plan.",
        )
    shapes = _share_shapes(plan, {p.name: tuple(p.shape) for p in package.manifest.parameters if p.alias_of is None})
    groups_of = _groups_of(package)
    whole = {u.group for u in package.manifest.updates if not u.elementwise}
    placed: dict[str, tuple[int, ...]] = {}
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            if slot.parameter in placed:
                raise PlanError("a parameter is placed twice", where=f"plan.buckets: {bucket.name}", got=slot.parameter)
            if slot.offset < end or slot.length != math.prod(slot.shape):
                raise PlanError("slots overlap or have the wrong length", where=f"plan.buckets: {bucket.name}: {slot.parameter}")
            groups = groups_of.get(slot.parameter, ())
            if (bucket.groups, bucket.whole) != (groups, tuple(g for g in groups if g in whole)):
                raise PlanError(
                    "a parameter is in a bucket of another update",
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
                    "a bucket has parameters that the tensor axis divides, and others",
                    where=f"plan.buckets: {bucket.name}: {slot.parameter}",
                    expected=f"divided: {slot.parameter in plan.tensor_shards}",
                    got=f"divided: {bucket.divided}",
                )
            placed[slot.parameter] = tuple(slot.shape)
            end = slot.offset + slot.length
        if bucket.length < end or bucket.length % plan.world_size:
            raise PlanError(
                "a bucket's length does not divide",
                where=f"plan.buckets: {bucket.name}",
                got=str(bucket.length),
                expected=f"a multiple of {plan.world_size} of at least {end}",
            )
    if placed != shapes:
        wrong = min(set(placed.items()) ^ set(shapes.items()))[0]
        raise PlanError(
            "the buckets do not hold the package's parameters",
            where=f"plan.buckets: {wrong}",
            expected=str(shapes.get(wrong, "no such parameter")),
            got=str(placed.get(wrong, "none")),
        )
    _check_batch(package, plan.global_batch, plan.data_ranks, plan.accumulate)


def _share_shapes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes that slots must have. Raises: PlanError where the tensor axis divides what there is not, or what it cannot."""
    found = dict(shapes)
    for name, shard in plan.tensor_shards.items():
        where = f"plan.tensor_shards: {name}"
        if name not in shapes:
            raise PlanError("the tensor axis divides a parameter that the package lacks", where=where)
        shape, ranks = shapes[name], plan.tensor_ranks
        if not shard.divides(shape, ranks):
            raise PlanError(
                "the tensor axis cannot divide a parameter so",
                where=where,
                expected=f"a dim of {shape} that is a multiple of {shard.blocks} blocks x {ranks} ranks",
                got=str(shard),
            )
        found[name] = shard.share_shape(shape, ranks)
    return found


def parameter_order(capture: GraphCapture) -> list[str]:
    """Names of a captured graph's parameters in the order of their first use."""
    names: dict[Node, str] = {}
    placeholders = [n for n in capture.exported.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, capture.exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.PARAMETER and spec.target is not None:
            names[node] = spec.target
    order: dict[str, None] = {}
    _walk(capture.exported.graph_module, names, order)
    return list(order)


def _walk(module: GraphModule, names: Mapping[Node, str], order: dict[str, None]) -> None:
    for node in module.graph.nodes:
        bodies = [s for s in node.all_input_nodes if s.op == "get_attr" and isinstance(getattr(module, str(s.target), None), GraphModule)]
        for body in bodies:
            graph_module: GraphModule = getattr(module, str(body.target))
            inner = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
            operands = [s for s in node.args if isinstance(s, Node) and s not in bodies]
            _walk(graph_module, {i: names[o] for i, o in zip(inner, operands, strict=False) if o in names}, order)
        for source in node.all_input_nodes:
            if source in names and node.op == "call_function":
                order.setdefault(names[source])


def _check_batch(package: Package, rows: int, world: int, accumulate: int) -> None:
    calls = world * accumulate
    if rows % calls:
        raise PlanError(
            "the global batch cannot be split evenly",
            where="global_batch",
            expected=f"a multiple of {world} workers x {accumulate} microbatches",
            got=str(rows),
            cure=f"Use --global-batch {max(1, rows // calls) * calls}, or another number of workers.",
        )
    for entry in (i for name in package.manifest.training_graphs() for i in package.manifest.graphs[name].inputs):
        if isinstance(entry.shape[0], int) and entry.shape[0] != rows // calls:
            raise PlanError(
                "the job was frozen with a static batch dim",
                where=f"input {entry.name}",
                expected=f"{entry.shape[0]} rows a call",
                got=f"{rows // calls}",
                cure="Choose the global batch, workers and accumulation so, or freeze with a dynamic batch dim.",
            )
    for name in package.manifest.training_graphs():
        guard = graph_guard(package.manifest.graphs[name])
        least, most = guard.ranges.get(str(guard.inputs[0].sizes[0]), (0, None))
        if rows // calls < least or (most is not None and rows // calls > most):
            raise PlanError(
                "the graph does not take so many rows a call",
                where=f"graph {name}",
                expected=f"{limits_text(least, most)} rows",
                got=f"{rows // calls}",
                cure="Choose the global batch, workers and accumulation so, or freeze with another range of the batch dim.",
            )


def _is_floating(dtype: str) -> bool:
    return dtype in ("float32", "float64", "float16", "bfloat16")
