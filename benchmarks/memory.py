"""Compare each rank's peak memory with the planner's estimate, with and without recomputation and
chunks of the loss.

    python benchmarks/memory.py [--compiled] [--width 128] [--rows 32]

A transformer (that of remat.py) and a language model with a large vocabulary are trained with one
plan of each strategy by gloo processes on CPUs. Each process records all its allocations with
torch's profiler, from before it has a parameter to the end of the third step: the greatest sum
during the third step is its peak. Resident: the kernel's high-water mark of the process during that
step, minus the resident set before the first parameter. The planner's estimate
(trainload plan --device) is computed from the plan's graphs alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

from measure import MIB, RESULTS, ROOT, PeakMemory, machine, note, save, screen, table
from remat import make_job

PLANS: dict[str, tuple[int, int, str | None, dict[str, Any]]] = {
    "single": (1, 1, "single", {}),
    "zero0": (1, 2, "zero0", {}),
    "zero1": (1, 2, "zero1", {}),
    "zero2, two microbatches": (1, 2, "zero2", {"accumulate": 2}),
    "zero3": (1, 4, "zero3", {}),
    "hybrid": (2, 2, "hybrid", {}),
    "tensor 2": (1, 2, None, {"tensor_ranks": 2}),
    "pipeline 2": (1, 2, None, {"pipeline_ranks": 2, "accumulate": 4}),
    "pipeline 2 x zero1": (1, 4, "zero1", {"pipeline_ranks": 2, "accumulate": 4}),
}
"""Number of nodes, devices per node, strategy, other options."""
VARIANTS: tuple[dict[str, Any], ...] = tuple(
    {"recompute": recompute} for recompute in ("job", "selective", "full")
)
LANGUAGE_PLANS = {
    f"language model, {name}": PLANS[name] for name in ("single", "tensor 2", "pipeline 2")
} | {"language model, zero3": (1, 2, "zero3", {})}
LANGUAGE_VARIANTS: tuple[dict[str, Any], ...] = tuple({"loss_chunks": n} for n in (1, 8))
EXPECTED = (
    "uncompiled within 3 %; compiled within 10 % without recomputation, and more than estimated"
    " with it, as remat.py has shown"
)
"""Expectation, written before the first measurement."""
BEGIN = "third step"
VOCABULARY = 8192


def rank_main(rank: int, case: dict[str, Any], folder: str) -> None:
    """Train three steps on one rank, and write its peaks to a file."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    os.environ["TRAINLOAD_STATE_DIR"] = str(Path(folder) / "state")
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    import trainload
    from trainload.autograd_trace.derivation.named_groups import bind_groups
    from trainload.launching.node.build import compile_build, load_build, uncompiled_build
    from trainload.launching.node.determinism import deterministic
    from trainload.launching.worker.calls import Microbatch
    from trainload.launching.worker.engine import Draw, Engine

    torch.set_num_threads(1)
    plan = trainload.Plan.model_validate_json(case["plan"])
    package = trainload.open(case["package"])
    store = dist.FileStore(str(Path(folder) / f"store-{case['name']}"), plan.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size)
    bind_groups(plan.groups())
    device, index, cache = torch.device("cpu"), plan.pipeline_index(rank), Path(folder) / "cache"
    with deterministic():
        if case["compiled"]:
            built = load_build(
                compile_build(package, plan, device, cache, lambda *_: None, index),
                package,
                plan,
                cache,
            )
        else:
            built = uncompiled_build(package, plan, device, index)
            if case["profiled"]:
                of_stages = [
                    graph.call
                    for stages in built.stages.values()
                    for graph in stages.parts.values()
                ]
                settle(
                    [graph.call for phases in built.train.values() for graph in phases.values()]
                    + of_stages
                )
        dist.barrier()
        memory, before = PeakMemory(), PeakMemory().now()
        # The profiler needs memory itself, so the resident set is measured in a process without it.
        watched = (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            if case["profiled"]
            else nullcontext()
        )
        with watched as recorded:
            engine = Engine(package, plan, rank, device, built)
            engine.held.load_package()
            for number in range(3):
                draw = Draw(
                    [Microbatch(batch(torch, plan, case), 0) for _ in range(plan.accumulate)]
                )
                if number == 2:
                    memory.reset()
                with record_function(BEGIN if number == 2 else "step"):
                    engine.step(number, [draw])
    result = Path(folder) / f"{case['name']}-{rank}.json"
    if recorded is None:
        result.write_text(json.dumps({"resident": memory.read()["peak"] - before}))
    else:
        result.write_text(
            json.dumps({"peak": peak_of(recorded, Path(folder) / f"trace-{rank}.json")})
        )
    dist.barrier()
    dist.destroy_process_group()


def batch(torch: Any, plan: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a call."""
    shape = (plan.rows_per_call, *case["shape"])
    if case["input"] == "tokens":
        return {"tokens": torch.randint(0, VOCABULARY, shape, dtype=torch.int32)}
    return {"x": torch.randn(shape)}


def language_model(rows: int) -> Any:
    """Build a job whose logits are its largest tensor."""
    import gpu_jobs

    config = gpu_jobs.Config(
        vocabulary=VOCABULARY, context=64, layers=2, width=128, heads=4, dropout=0.0
    )
    return gpu_jobs.build_job(gpu_jobs.Case(config, rows, 1e-3, whole=False))


def settle(graphs: Iterable[Any]) -> None:
    """Make uncompiled graphs sleep briefly after each wait.

    During the sleep the threads of the communication library release their tensor references.
    Whichever thread drops the last reference frees a tensor, and the profiler records only this
    thread's frees.
    """
    import torch

    for graph in graphs:
        for wait in graph.graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.wait_tensor.default
        ):
            with graph.graph.inserting_after(wait):
                graph.graph.call_function(time.sleep, (0.002,))
        graph.recompile()


def peak_of(recorded: Any, trace: Path) -> int:
    """Return the greatest sum of allocations since the beginning of the third step."""
    recorded.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    begin = next(e["ts"] for e in events if e.get("name") == BEGIN)
    now = peak = 0
    for at, size in sorted(
        (e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"
    ):
        now += size
        peak = max(peak, now) if at >= begin else peak
    return int(peak)


def measured(case: dict[str, Any], world: int, folder: Path) -> dict[str, int]:
    """Return the greatest peaks of all ranks."""
    found = [
        _run({**case, "profiled": profiled, "name": f"{case['name']}-{profiled}"}, world, folder)
        for profiled in (True, False)
    ]
    return {
        name: max(each[name] for each in ranks)
        for name, ranks in zip(("peak", "resident"), found, strict=True)
    }


def _run(case: dict[str, Any], world: int, folder: Path) -> list[dict[str, int]]:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_main, args=(rank, case, str(folder))) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes), "a rank failed"
    return [
        json.loads((folder / f"{case['name']}-{rank}.json").read_text()) for rank in range(world)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiled", action="store_true", help="compile the graphs")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--rows", type=int, default=32, help="rows per update")
    parser.add_argument("--only", default="", help="only plans whose names contain this text")
    parser.add_argument(
        "--out", type=Path, help="output file; default: results/memory.json or memory_compiled.json"
    )
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    import trainload
    from trainload.sharding.planner.device import read
    from trainload.sharding.planner.plan_source import Source
    from trainload.sharding.planner.search import costs_of

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRAINLOAD_STATE_DIR"] = str(Path(folder) / "state")
        for job, plans, variants in (
            (lambda: make_job(True, options.width, options.rows), PLANS, VARIANTS),
            (lambda: language_model(options.rows), LANGUAGE_PLANS, LANGUAGE_VARIANTS),
        ):
            chosen = {name: plan for name, plan in plans.items() if options.only in name}
            if not chosen:
                continue
            package = trainload.freeze(job(), Path(folder) / f"{len(found)}.tl")
            ((given, data),) = package.manifest.data_inputs().items()
            source = Source(package)
            for (plan_name, (nodes, devices, strategy, more)), variant in product(
                chosen.items(), variants
            ):
                cluster = trainload.Cluster(nodes=nodes, devices_per_node=devices)
                wanted = {"global_batch": options.rows, "bucket_bytes": 2**20, **variant, **more}
                plan = trainload.plan(package, cluster, strategy, **wanted)
                estimated = costs_of(source, plan, read("h100"), compiled=options.compiled).memory
                label = ", ".join(map(str, variant.values()))
                case = {
                    "name": f"{plan_name}, {label}".replace(" ", "_"),
                    "plan": plan.model_dump_json(),
                    "package": str(package.path),
                    "compiled": options.compiled,
                    "input": given,
                    "shape": list(data.shape[1:]),
                }
                taken = measured(case, plan.world_size, Path(folder))
                entry = {
                    "plan": plan_name,
                    **variant,
                    "variant": label,
                    "estimated": estimated.tensors,
                    "at": estimated.at,
                    **taken,
                }
                entry["ratio"] = estimated.tensors / taken["peak"]
                found.append(entry)
                note(f"{case['name']}: {entry['ratio']:.3f}")
                source.forget()
    rows = [
        [
            f"{e['plan']}, {e['variant']}",
            *(f"{e[k] / MIB:.1f}" for k in ("estimated", "peak", "resident")),
            f"{e['ratio']:.3f}",
        ]
        for e in found
    ]
    screen().print(
        table(
            "MiB of one rank at its peak",
            ["plan", "estimated", "measured", "resident", "estimated / measured"],
            rows,
        )
    )
    settings = {"compiled": options.compiled, "width": options.width, "rows": options.rows}
    default = RESULTS / ("memory_compiled.json" if options.compiled else "memory.json")
    save(
        {"expected": EXPECTED, "machine": machine(), **settings, "found": found},
        options.out or default,
    )


if __name__ == "__main__":
    main()
