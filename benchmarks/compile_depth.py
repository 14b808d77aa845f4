"""Measure how long a training step takes to compile, for models of several depths.

    python benchmarks/compile_depth.py --layers 6 12 24 48

The model is the GPT of examples/gpt in float32, on one device. Every measurement has its own
process with an empty Inductor cache. Systems: trainload with repeated layers compiled once, as a
launch does it; trainload flat; torch.compile of the whole model; torch.compile of each block. The
peers compile loss and gradients by one forward and one backward call.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine, note, save, screen, see_example, table

SYSTEMS = ("outlined", "flat", "torch.compile, whole", "torch.compile, each block")
ROWS = 4


def job(layers: int) -> Any:
    """Return the example's job in float32, with this number of layers."""
    see_example()
    import job as example
    from model import GPT, Config

    model = GPT(Config(layers=layers, autocast=False))
    return dataclasses.replace(example.job_fp32(), model=model)


def compile_package(package: Path, system: str, folder: Path) -> None:
    """Compile the training graph of a package, and print the seconds."""
    import trainload
    from trainload.autograd_trace.compiling import inductor
    from trainload.launching.node.build import uncompiled_graphs
    from trainload.launching.node.determinism import deterministic

    opened = trainload.open(package)
    plan = trainload.plan(opened, trainload.Cluster(devices_per_node=1))
    graph = uncompiled_graphs(opened, plan, torch.device("cpu"))["train.only"]
    if system == "flat":
        inductor.prepare_graph(graph)
    with Timer(), deterministic():
        if system == "flat":
            inductor._compile(graph, folder / "graph.bin", {})
        else:
            inductor.compile_graph(graph, folder / "graph.bin", {})


def compile_model(layers: int, system: str) -> None:
    """Compile the model as a user of torch.compile does, and print the seconds."""
    see_example()
    from job import loss
    from model import GPT, Config

    model = GPT(Config(layers=layers, autocast=False))
    batch = {"tokens": torch.randint(0, 256, (ROWS, 129), dtype=torch.uint8)}
    if system == "torch.compile, whole":
        model.compile()
    else:
        for block in model.blocks:
            block.compile()
    with Timer():
        loss(model, batch).value.backward()


class Timer:
    """Prints the seconds of a block: wall clock, this process, and its children."""

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._used = self._seconds()

    def __exit__(self, *_: object) -> None:
        own, children = (
            now - before for now, before in zip(self._seconds(), self._used, strict=True)
        )
        wall = time.perf_counter() - self._began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"wall": wall, "python": own, "children": children, "peak": peak}))

    def _seconds(self) -> tuple[float, float]:
        own, children = (
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def measure(layers: int, system: str, package: Path) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-W", "ignore", __file__, "--child", system]
        command += ["--layers", str(layers), "--package", str(package), "--out", scratch]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/cache"}
        done = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--out", type=Path, default=RESULTS / "compile_depth.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--package", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        if arguments.child in ("outlined", "flat"):
            compile_package(arguments.package, arguments.child, arguments.out)
        else:
            compile_model(arguments.layers[0], arguments.child)
        return

    import trainload

    results: dict[str, dict[str, Any]] = {system: {} for system in arguments.systems}
    with tempfile.TemporaryDirectory() as scratch:
        for layers in arguments.layers:
            note(f"{layers} layers: freezing")
            package = Path(scratch) / f"{layers}.tl"
            trainload.freeze(job(layers), package)
            for system in arguments.systems:
                results[system][str(layers)] = measure(layers, system, package)
                note(f"  {system}: {results[system][str(layers)]}")
    rows = [
        [
            system,
            *(
                "{python:.1f} + {children:.1f}".format(**results[system][str(layers)])
                for layers in arguments.layers
            ),
        ]
        for system in arguments.systems
    ]
    columns = ["CPU seconds, Python + C++ compiler", *map(str, arguments.layers)]
    screen().print(table("Compiling a training step, by layers", columns, rows))
    save({"machine": machine(), "rows": ROWS, "systems": results}, arguments.out)


if __name__ == "__main__":
    main()
