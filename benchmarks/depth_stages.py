"""Measure how long everything but compiling takes, for models of several depths.

    python benchmarks/depth_stages.py --layers 6 48

Freezing, reading, deriving, making a rank's graphs, finding repeated layers, planning and
simulating; the model is the GPT of examples/gpt in float32, the plan ZeRO-3 on 8 devices. Each
depth has a process of its own; figures are CPU seconds, as the stages use one core. Stages of less
than a second are run three times, on a package that was just opened; their median counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from measure import RESULTS, machine, median, note, save, screen, table

T = TypeVar("T")
DEVICE = torch.device("cpu")


def measure(layers: int, scratch: Path) -> dict[str, float]:
    """Run the stages for a model of this number of layers. Return the CPU seconds of each."""
    from compile_depth import job

    import trainload
    from trainload.autograd_trace.compiling.inductor import prepare_graph
    from trainload.autograd_trace.derivation.aot import derive
    from trainload.autograd_trace.outlining.outline import outline
    from trainload.launching.node.build import uncompiled_graphs

    seconds: dict[str, float] = {}

    def timed(stage: str, function: Callable[[], T], times: int = 1) -> T:
        taken = []
        for _ in range(times):
            began = time.process_time()
            result = function()
            taken.append(time.process_time() - began)
        seconds[stage] = median(taken)
        return result

    trainload.freeze(job(1), scratch / "first.tl")  # imports what all need
    package = timed("freeze", lambda: trainload.freeze(job(layers), scratch / "package.tl"))
    program = timed("read", lambda: trainload.open(package.path).program())
    timed("derive", lambda: derive(program, "train", DEVICE))
    cluster = trainload.Cluster(devices_per_node=8, device="cpu")
    plan = timed("plan", lambda: trainload.plan(trainload.open(package.path), cluster, "zero3"), 3)
    timed("search for a plan", lambda: trainload.plan(trainload.open(package.path), cluster), 3)
    graphs = timed("a rank's graphs", lambda: uncompiled_graphs(package, plan, DEVICE))
    train = graphs["train.only"]
    prepare_graph(train)
    timed("find layers", lambda: outline(train), 3)
    timed("simulate", lambda: trainload.simulate(package, plan))
    return seconds


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--out", type=Path, default=RESULTS / "depth_stages.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(measure(arguments.layers[0], Path(scratch))))
        return
    results: dict[str, dict[str, float]] = {}
    for layers in arguments.layers:
        command = [sys.executable, "-W", "ignore", __file__, "--child", "--layers", str(layers)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        results[str(layers)] = json.loads(done.stdout.splitlines()[-1])
        note(f"{layers} layers: {results[str(layers)]}")
    first, last = (results[str(layers)] for layers in (arguments.layers[0], arguments.layers[-1]))
    rows: list[list[Any]] = [
        [
            stage,
            *(f"{figures[stage]:.1f}" for figures in results.values()),
            f"{last[stage] / first[stage]:.1f}",
        ]
        for stage in first
    ]
    columns = ["CPU seconds, by layers", *results, "last / first"]
    screen().print(table("All but compiling, by layers", columns, rows))
    save({"machine": machine(), "layers": results}, arguments.out)


if __name__ == "__main__":
    main()
