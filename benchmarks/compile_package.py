"""Compile the graphs of a package for a plan into a cache.

    python benchmarks/compile_package.py PACKAGE PLAN.json CACHE [--flat]

With --flat, every layer is compiled, rather than one of those that repeat. A benchmark runs it in a
process of its own, as a launch does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import note
from torch.fx import GraphModule

from trainload.autograd_trace.compiling import inductor
from trainload.autograd_trace.outlining.outline import Outlined
from trainload.launching.node.build import compile_build
from trainload.launching.worker.preparation import compiling_processes
from trainload.packaging.package import open_package
from trainload.sharding.plans.plan import Plan


def leave_flat(module: GraphModule) -> Outlined:
    """Find no layers in a graph."""
    return Outlined(module, (), 0)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--flat", action="store_true")
    arguments = parser.parse_args()
    if arguments.flat:
        setattr(inductor, "outline", leave_flat)  # noqa: B010  # a name that it imports
    torch.set_num_threads(1)
    plan = Plan.model_validate_json(arguments.plan.read_bytes())
    compile_build(
        open_package(arguments.package),
        plan,
        torch.device(plan.cluster.device),
        arguments.cache,
        lambda stage, seconds: note(f"  {stage}: {seconds:.1f} s"),
        processes=compiling_processes(plan),
    )


if __name__ == "__main__":
    main()
