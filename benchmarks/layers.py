"""Count the layers that are compiled once, for several models and plans.

    python benchmarks/layers.py

For each model and plan, all graphs of all ranks are outlined as a launch does it, and the result is
run interpreted beside the flat graph on the same random inputs: all outputs must be bitwise equal.
Nothing is compiled.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine, note, save, screen, see_example, table
from torch import Tensor
from torch.fx import GraphModule

import trainload
from trainload.autograd_trace.compiling.inductor import prepare_graph
from trainload.autograd_trace.outlining.outline import NotOutlined, Outlined, outline
from trainload.capture.operators import is_collective
from trainload.core.errors import PlanError
from trainload.launching.node.build import uncompiled_graphs

PLANS: dict[str, dict[str, Any]] = {
    "single": {},
    "zero3": {"devices": 2, "strategy": "zero3", "bucket_bytes": 60_000},
    "tensor 2": {"devices": 2, "tensor_ranks": 2},
    "pipeline 2": {"devices": 2, "pipeline_ranks": 2},
    "accumulate 4": {"accumulate": 4},
    "full recompute": {"recompute": "full"},
}
SYMBOL = 4
"""Rows of the inputs on which the graphs are compared."""


def plan_of(package: trainload.Package, name: str) -> trainload.Plan:
    """Return a plan of `PLANS` for a package."""
    options = dict(PLANS[name])
    cluster = trainload.Cluster(devices_per_node=options.pop("devices", 1), device="cpu")
    return trainload.plan(package, cluster, options.pop("strategy", None), **options)


def is_comparable(module: GraphModule) -> bool:
    """Return True if a graph can be run in one process."""
    return not any(map(is_collective, module.graph.nodes))


def example_inputs(module: GraphModule) -> list[Any]:
    """Return random inputs of a graph, with `SYMBOL` in place of symbolic sizes."""
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake: Tensor = node.meta["val"]
        shape = [int(eval(re.sub(r"\bs\d+", str(SYMBOL), str(size)))) for size in fake.shape]
        if fake.is_floating_point():
            values.append(torch.randn(shape, generator=generator).to(fake.dtype) * 0.1)
        elif fake.dtype is torch.bool:
            values.append(torch.ones(shape, dtype=torch.bool))
        else:
            values.append(torch.randint(0, 2, shape, generator=generator).to(fake.dtype))
    return values


def count(module: GraphModule) -> int:
    """Return the number of operators of a graph."""
    return sum(node.op == "call_function" for node in module.graph.nodes)


def outlined_graph(module: GraphModule) -> dict[str, Any]:
    """Outline a graph and compare it. Return what the table needs."""
    prepare_graph(module)
    flat = count(module)
    began = time.perf_counter()
    try:
        outlined: Outlined | None = outline(module)
    except NotOutlined as reason:
        return {"flat": flat, "left": flat, "regions": [], "fallback": str(reason)}
    seconds = time.perf_counter() - began
    assert outlined is not None
    result = {
        "flat": flat,
        "left": outlined.nodes,
        "regions": [[region.nodes, region.calls] for region in outlined.regions],
        "seconds": seconds,
    }
    if outlined.regions and is_comparable(module):
        module.recompile()
        inputs = example_inputs(module)
        with torch.no_grad():
            pairs = zip(module(*inputs), outlined.module(*inputs), strict=True)
            result["equal"] = all(
                torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in pairs
            )
    return result


def measure(package: trainload.Package, name: str) -> dict[str, Any]:
    """Outline the training graphs of all ranks of a plan. Return the results by their names."""
    plan = plan_of(package, name)
    graphs: dict[str, Any] = {}
    for index in range(plan.pipeline_ranks):
        modules = uncompiled_graphs(package, plan, torch.device("cpu"), index)
        for graph, module in modules.items():
            if not graph.endswith("update"):
                graphs[graph] = outlined_graph(module)
    return graphs


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", help="parts of names of models")
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--out", type=Path, default=RESULTS / "layers.json")
    arguments = parser.parse_args()
    see_example()
    from layered_models import LAYERS, MODELS, Size

    results: dict[str, dict[str, Any]] = {}
    rows = []
    for name, model in MODELS.items():
        if arguments.models and not any(part in name for part in arguments.models):
            continue
        note(f"{name}: freezing")
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the models
            torch.manual_seed(0)
            package = trainload.freeze(model.job(Size()), Path(scratch) / "package.tl")
            results[name] = {}
            for plan in arguments.plans:
                try:
                    graphs = measure(package, plan)
                except PlanError as error:
                    results[name][plan] = {"refused": str(error).splitlines()[0]}
                    rows.append([name, plan, "no such plan", "", "", "", ""])
                    continue
                results[name][plan] = graphs
                regions = [region for each in graphs.values() for region in each["regions"]]
                rows.append(
                    [
                        name,
                        plan,
                        str(2 * model.parts),
                        " ".join(f"{nodes}x{calls}" for nodes, calls in regions),
                        f"{sum(each['flat'] for each in graphs.values())}",
                        f"{sum(each['left'] for each in graphs.values())}",
                        str(sum("fallback" in each for each in graphs.values())),
                        {True: "yes", False: "NO"}[
                            all(each.get("equal", True) for each in graphs.values())
                        ],
                    ]
                )
                note(f"  {plan}: {rows[-1][2:]}")
    columns = ["model", "plan", "expected", "regions x calls", "flat", "left", "fallbacks", "equal"]
    screen().print(table(f"Layers compiled once, of {LAYERS}", columns, rows))
    save({"machine": machine(), "layers": LAYERS, "models": results}, arguments.out)


if __name__ == "__main__":
    main()
