"""Stages of a process that has only the wheel, its dependencies and packages.

The stages are loaded, joint and two workers. Run as a script: `python elsewhere.py FOLDER...`. Each
folder holds `case.tl`, `batch.safetensors` and `request.json`; the results are `joint.safetensors`
and `answer.json`. It imports nothing from tests/.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.named_groups import bind_groups
from trainload.autograd_trace.graphs import Port, StepGraph
from trainload.launching.node.process_groups import leave_groups
from trainload.packaging.package import Package, open_package
from trainload.sharding.planner.make_plan import make_plan
from trainload.sharding.plans.plan import Cluster
from trainload.sharding.rewriting.rewrite import rewrite

WORLD = 2
FOREIGN = ("tests", "transformers", "timm", "pytest")
Values = dict[str, Tensor]


def run_graph(
    module: torch.fx.GraphModule,
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    values: Mapping[str, Tensor],
) -> Values:
    """Run a graph on values named "role/name", and return its outputs with such names."""
    with torch.no_grad():
        results = module(*(values[f"{p.role.value}/{p.name}"] for p in inputs))
    return {f"{p.role.value}/{p.name}": r for p, r in zip(outputs, results, strict=True)}


def inputs_of(
    package: Package, batch: Mapping[str, Tensor], *, seed: int, step: int, row: int, scale: float
) -> Values:
    """Return the inputs of a training graph by "role/name", with the weights of the package."""
    program = package.program()
    values = {
        f"parameter/{p.name}": program.state[p.name]
        for p in program.parameters
        if p.alias_of is None
    }
    values |= {f"buffer/{b.name}": program.state[b.name].clone() for b in program.buffers}
    values |= {f"constant/{name}": value for name, value in program.constants.items()}
    values |= {f"batch/{name}": value for name, value in batch.items()}
    whole = {"seed": seed, "step": step, "row": row}
    return (
        values
        | {f"{k}/{k}": torch.tensor(v) for k, v in whole.items()}
        | {"scale/scale": torch.tensor(scale)}
    )


def one_worker(
    package: Package,
    step: StepGraph,
    batch: Mapping[str, Tensor],
    request: Mapping[str, Any],
    row: int = 0,
) -> Values:
    """Return the outputs of a whole call. Gradients are those of scale * weight * loss."""
    values = inputs_of(
        package, batch, seed=request["seed"], step=request["step"], row=row, scale=request["scale"]
    )
    return run_graph(step.module, step.inputs, step.outputs, values)


def halves_of_one_worker(
    package: Package, step: StepGraph, batch: Mapping[str, Tensor], request: Mapping[str, Any]
) -> Values:
    """Compute on one worker what two workers should compute together.

    The result is the sums of weight * loss, weight and gradients over both halves.
    """
    rows = next(iter(batch.values())).shape[0]
    totals: Values = {}
    for row in (0, rows // WORLD):
        half = {name: value[row : row + rows // WORLD] for name, value in batch.items()}
        for name, value in _summed(one_worker(package, step, half, request, row)).items():
            totals[name] = totals[name] + value if name in totals else value
    return totals


def _summed(out: Mapping[str, Tensor]) -> Values:
    weight = out["weight/weight"]
    return {"weight": weight, "loss": weight * out["loss/loss"].float()} | {
        n: v for n, v in out.items() if n.startswith("gradient/")
    }


def two_workers(
    package: Package,
    step: StepGraph,
    batch: Mapping[str, Tensor],
    request: Mapping[str, Any],
    folder: Path,
) -> tuple[float, float]:
    """Run two gloo ranks, each with half of the rows.

    Returns: the relative differences of the loss and of all gradients from those of one worker.
    """
    rows = next(iter(batch.values())).shape[0]
    plan = make_plan(package, Cluster(devices_per_node=WORLD), "zero0", global_batch=rows)
    graph = rewrite(step, plan)

    def rank_step(rank: int) -> Values:
        store = dist.FileStore(str(folder / "store"), WORLD)  # type: ignore[attr-defined]  # public, though not in __all__
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        bind_groups(plan.groups())
        row = rank * (rows // WORLD)
        half = {name: value[row : row + rows // WORLD] for name, value in batch.items()}
        values = inputs_of(
            package,
            half,
            seed=request["seed"],
            step=request["step"],
            row=row,
            scale=request["scale"],
        )
        for bucket in plan.buckets:
            flat = torch.zeros(bucket.length, dtype=getattr(torch, bucket.dtype))
            for slot in bucket.slots:
                flat[slot.offset : slot.offset + slot.length] = values[
                    f"parameter/{slot.parameter}"
                ].flatten()
            values[f"bucket/{bucket.name}"] = flat
        out = run_graph(graph.module, graph.inputs, graph.outputs, values)
        dist.barrier()
        leave_groups()
        return out

    sys.stdout.flush()
    child = os.fork()  # the child inherits the package and the graph
    if child == 0:
        status = 1
        try:
            rank_step(1)
            status = 0
        finally:
            os._exit(status)
    out = rank_step(0)
    assert os.waitpid(child, 0)[1] == 0, "the other rank failed"
    expected = halves_of_one_worker(package, step, batch, request)
    if not request["mixes_rows"]:
        expected = _summed(one_worker(package, step, batch, request))
    totals = out["totals/totals"]
    found = {}
    for bucket in plan.buckets:
        reduced = out.get(f"bucket_gradient/{bucket.name}")
        for slot in bucket.slots if reduced is not None else ():
            assert reduced is not None
            found[f"gradient/{slot.parameter}"] = reduced[
                slot.offset : slot.offset + slot.length
            ].view(slot.shape)
    names = [n for n in expected if n.startswith("gradient/")]
    assert set(names) <= set(found), "a gradient is missing"
    norm = float(torch.stack([expected[n].double().norm() for n in names]).norm())
    apart = float(
        torch.stack([(expected[n].double() - found[n].double()).norm() for n in names]).norm()
    )
    loss = float(expected["loss"])
    return abs(float(totals[0]) - loss) / max(abs(loss), 1e-12), apart / max(norm, 1e-12)


def visit(folder: Path) -> dict[str, Any]:
    """Run the stages for one folder.

    Returns: stage -> {"seconds", "error"}, and the measured differences.
    """
    request = json.loads((folder / "request.json").read_text())
    batch = load_file(folder / "batch.safetensors")
    answer: dict[str, Any] = {
        "foreign": [name for name in FOREIGN if importlib.util.find_spec(name) is not None]
    }
    held: dict[str, Any] = {}

    def load() -> None:
        held["package"] = open_package(folder / "case.tl")
        held["package"].program()

    def joint() -> None:
        held["step"] = derive(held["package"].program(), "train", torch.device("cpu"))
        rows = {
            name: value[torch.arange(request["rows"]) % value.shape[0]]
            for name, value in batch.items()
        }
        out = one_worker(held["package"], held["step"], rows, request)
        save_file(
            {name: value.contiguous() for name, value in out.items()}, folder / "joint.safetensors"
        )

    def workers() -> None:
        rows = {
            name: value[torch.arange(request["two_rows"]) % value.shape[0]]
            for name, value in batch.items()
        }
        shared = {**request, "scale": 1.0 / request["two_rows"]}
        loss, gradients = two_workers(held["package"], held["step"], rows, shared, folder)
        answer["two_workers_apart"] = [loss, gradients]
        if not max(loss, gradients) <= request["tolerance"]:
            raise AssertionError(
                f"two workers differ from one: loss by {loss:.2g}, gradients by {gradients:.2g}"
            )

    stages: dict[str, Callable[[], None]] = {"loaded": load, "joint": joint, "two workers": workers}
    for name, stage in stages.items():
        if name == "two workers" and not request["two_rows"]:
            continue
        start = time.perf_counter()
        answer[name] = {"error": ""}
        try:
            stage()
        except Exception as error:  # noqa: BLE001 - whatever a stage raises is what the table tells
            answer[name]["error"] = f"{type(error).__name__}: {error}"
        answer[name]["seconds"] = time.perf_counter() - start
        if answer[name]["error"]:
            break
    return answer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        place = Path(argument)
        found = visit(place)
        (place / "answer.json").write_text(json.dumps(found))
