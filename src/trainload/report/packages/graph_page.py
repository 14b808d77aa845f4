"""The page of a package: each training graph as a tree of modules, which open to their operators
beside source lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.job.ambient import neutrally
from trainload.core.formatting import size
from trainload.packaging.format.source_map import SourceMap, named_nodes
from trainload.packaging.package import Package
from trainload.report.frame.page_frame import rendered
from trainload.report.frame.words import count, percent, sanitize
from trainload.report.packages.module_tree import Budget, Module, Operator, module_tree
from trainload.report.packages.step_costs import costs_by_origin, innermost_module
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.node_costs import EXAMPLE, number
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.planner.plan_costs import sizes_of
from trainload.sharding.plans.buckets import item_bytes
from trainload.sharding.plans.device_step_graphs import sourced_step_graphs
from trainload.sharding.plans.plan import Bucket, Plan
from trainload.sharding.rewriting.local_step import Local, local_step
from trainload.sharding.rewriting.rewrite import stored_length, update_length
from trainload.transforms.listing import listed_text

_MOST_GRAPHS, _MOST_INPUTS, _MOST_BUCKETS, _MOST_FILES, _MOST_OTHERS = 8, 20, 200, 200, 50
_OPEN_TO = 2
"""Depth to which the tree is open when the page is opened."""
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class _Graph:
    """A training graph of the page.

    Attributes:
        name: its name.
        rows: rows of the call that the numbers are for.
        root: its modules.
        operators: number of its captured operators.
        modules: number of modules.
        inputs: its inputs from the data, with dtypes and sizes.
        symbols: the symbols of these sizes, with their values in the example batch.
    """

    name: str
    rows: int
    root: Module
    operators: int
    modules: int
    inputs: Sequence[str]
    symbols: Sequence[str]


@neutrally
def package_page(package: Package, plan: Plan | None = None) -> tuple[str, dict[str, Any]]:
    """Return the page of a package as HTML, and a summary of each graph.

    The training graphs are derived again, with the source lines of their operators, which takes
    about as long as the freeze needs for it.

    Args:
        package: the package.
        plan: a plan of the package, to show what is sharded and recomputed; the numbers are then
            those of one rank.

    Raises:
        PlanError: the plan is not for this package, or its graphs cannot be made.
        PackageError, IntegrityError, UnsafePackageError: a graph cannot be read.
    """
    if plan is not None:
        check_plan(plan, package)
    names = package.manifest.training_graphs()
    sources, budget = SourceMap(package.path), Budget()
    files = _short_names(sources.files)
    graphs = [
        _graph(package, plan, name, step, sources, files, budget)
        for name, step in sourced_step_graphs(
            package, torch.device("cpu"), names[:_MOST_GRAPHS]
        ).items()
    ]
    page = rendered(
        "packages/graph.html",
        script="packages/graph.js",
        name=sanitize(package.path.name, _LONGEST),
        digest=package.digest,
        plan=None if plan is None else _plan_words(plan),
        graphs=graphs,
        tiles={graph.name: _tiles(graph) for graph in graphs},
        shown=_shown,
        open_to=_OPEN_TO,
        others=_others(package, {graph.name for graph in graphs}),
        facts=_facts(package),
        buckets=[]
        if plan is None
        else [_bucket(plan, each) for each in plan.buckets][:_MOST_BUCKETS],
        buckets_more=0 if plan is None else max(0, len(plan.buckets) - _MOST_BUCKETS),
        files=[
            (name, sanitize(path, _LONGEST), "" if digest is None else str(digest)[:12])
            for (path, name), digest in zip(
                list(files.items())[:_MOST_FILES], sources.files.values(), strict=False
            )
        ],
        files_more=max(0, len(files) - _MOST_FILES),
    )
    return page, {
        graph.name: {
            "operators": graph.operators,
            "modules": graph.modules,
            "parameters": graph.root.elements,
            "saved_bytes": graph.root.cost.saved,
            "forward_flops": graph.root.cost.forward,
            "backward_flops": graph.root.cost.backward,
            "recomputed": graph.root.cost.recomputed,
        }
        for graph in graphs
    }


def _graph(
    package: Package,
    plan: Plan | None,
    name: str,
    step: StepGraph,
    sources: SourceMap,
    files: dict[str, str],
    budget: Budget,
) -> _Graph:
    used = {port.name for port in step.inputs if port.role is Role.PARAMETER}
    rows = _example_rows(step) if plan is None else plan.rows_per_call
    local = step if plan is None else local_step(step, Local.of(plan))
    sizes = EXAMPLE if plan is None else sizes_of(local.module, local.inputs, rows)
    module = package.captured(name).exported.graph_module
    operators = list(_operators(module, name, sources))
    inputs, symbols = _inputs(step)
    root = module_tree(
        operators,
        [parameter for parameter in package.parameters if parameter.name in used],
        {} if plan is None else _placed(plan),
        costs_by_origin(local, sizes),
        files,
        budget,
    )
    modules = sum(1 for _ in root.walk())
    title = sanitize(name, _LONGEST)
    return _Graph(title, rows, root, len(operators), modules, inputs, symbols)


def _operators(module: GraphModule, graph: str, sources: SourceMap) -> Iterable[Operator]:
    for name, node in named_nodes(module):
        if node.op == "call_function":
            yield Operator(
                listed_text(name, node), innermost_module(node), sources.place(graph, name)
            )


def _example_rows(step: StepGraph) -> int:
    """Return the number of rows of the example batch."""
    return next((number(value.shape[0]) for _, value in _batch(step) if value.ndim), 1)


def _batch(step: StepGraph) -> list[tuple[str, Tensor]]:
    """Return (name, fake value) of the inputs from the data."""
    placeholders, _ = ends(step.module)
    return [
        (port.name, node.meta["val"])
        for node, port in zip(placeholders, step.inputs, strict=True)
        if port.role is Role.BATCH and isinstance(node.meta["val"], Tensor)
    ]


def _inputs(step: StepGraph) -> tuple[list[str], list[str]]:
    """Return texts about the inputs, and about the symbols of their sizes."""
    inputs: list[str] = []
    symbols: dict[str, int] = {}
    for name, value in _batch(step)[:_MOST_INPUTS]:
        sizes = ", ".join(map(str, value.shape))
        dtype = str(value.dtype).removeprefix("torch.")
        inputs.append(sanitize(f"{name}: {dtype}[{sizes}]", _LONGEST))
        symbols |= {str(each): number(each) for each in value.shape if not str(each).isdigit()}
    return inputs, [sanitize(f"{name} = {value}", _LONGEST) for name, value in symbols.items()]


def _placed(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return parameter -> its bucket, and its division on the tensor axis."""
    return {
        slot.parameter: (
            bucket.name,
            f"{shard} over {plan.tensor_ranks} ranks"
            if (shard := plan.tensor_shards.get(slot.parameter)) is not None
            else "",
        )
        for bucket in plan.buckets
        for slot in bucket.slots
    }


def _short_names(files: Iterable[str]) -> dict[str, str]:
    """Return path -> as many of its last parts as distinguish it from the other paths."""
    paths = list(files)
    names = dict.fromkeys(paths, 1)

    def tail(path: str) -> str:
        return "/".join(path.split("/")[-names[path] :])

    for _ in range(8):
        counts = Counter(tail(path) for path in paths)
        twice = [path for path in paths if counts[tail(path)] > 1]
        for path in twice:
            names[path] += 1
        if not twice:
            break
    return {path: sanitize(tail(path), _LONGEST) for path in paths}


def _tiles(graph: _Graph) -> list[tuple[str, str, str]]:
    root, cost = graph.root, graph.root.cost
    listed = sum(len(line.operators) for each in root.walk() for line in each.lines.values())
    return [
        ("operators", f"{graph.operators:,}", f"{listed:,} listed"),
        ("modules", f"{graph.modules:,}", "with the model itself"),
        ("parameters", count(root.elements), size(root.bytes)),
        ("kept for backward", size(cost.saved), f"{graph.rows:,} rows"),
        ("forward", count(cost.forward), "FLOP of products"),
        (
            "backward",
            count(cost.backward),
            f"{cost.backward / cost.forward:.1f} x forward" if cost.forward else "",
        ),
        ("recomputed", f"{cost.recomputed:,}", "operators"),
    ]


def _shown(module: Module) -> list[tuple[str, str]]:
    """Return (title, number) of the totals of a module; "" for a number that is 0."""
    cost = module.cost
    return [
        ("operators", f"{module.operators:,}" if module.operators else ""),
        ("parameters", count(module.elements) if module.elements else ""),
        ("their size", size(module.bytes) if module.bytes else ""),
        ("kept", size(cost.saved) if cost.saved else ""),
        ("forward", count(cost.forward) if cost.forward else ""),
        ("backward", count(cost.backward) if cost.backward else ""),
        ("recomputed", f"{cost.recomputed:,}" if cost.recomputed else ""),
    ]


def _others(package: Package, shown: set[str]) -> list[tuple[str, int]]:
    """Return (name, number of inputs) of the graphs that the page does not show."""
    entries = package.manifest.graphs.items()
    return [(sanitize(name, _LONGEST), len(e.inputs)) for name, e in entries if name not in shown][
        :_MOST_OTHERS
    ]


def _facts(package: Package) -> list[tuple[str, str]]:
    recipe = package.recipe
    return [
        ("digest", package.digest),
        ("program", package.manifest.program_digest),
        ("optimizer", sanitize(recipe.optimizer, _LONGEST)),
        ("rows of an update", f"{recipe.global_batch:,}"),
        ("steps", f"{recipe.steps:,}"),
        ("weights", "none: the package is abstract" if not package.has_weights else "included"),
    ]


def _plan_words(plan: Plan) -> str:
    cluster = plan.cluster
    parts = [
        f"{plan.strategy} on {cluster.nodes} x {cluster.devices_per_node} {cluster.device}",
        *([f"{plan.divide} over {plan.tensor_ranks} ranks"] if plan.tensor_ranks > 1 else []),
        *([f"pipeline of {plan.pipeline_ranks} ranks"] if plan.pipeline is not None else []),
        f"recompute {plan.recompute}",
        *([f"loss in {plan.loss_chunks} chunks"] if plan.loss_chunks > 1 else []),
        *([f"offload {percent(plan.offload)}"] if plan.offload else []),
    ]
    return ", ".join(parts)


def _bucket(plan: Plan, bucket: Bucket) -> dict[str, Any]:
    item = item_bytes(bucket.dtype)
    return {
        "name": sanitize(bucket.name, _LONGEST),
        "dtype": bucket.dtype,
        "parameters": f"{len(bucket.slots):,}",
        "size": size(bucket.length * item),
        "stored": size(stored_length(plan, bucket) * item),
        "updated": size(update_length(plan, bucket) * item) if bucket.groups else "frozen",
        "divided": f"1/{plan.tensor_ranks} of each" if bucket.divided else "",
        "stages": ", ".join(map(str, bucket.stages)),
    }
