"""A rank whose graphs are those that a compiler receives: repeated layers are calls of one body."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.laws.worker import train_as_rank
from torch.fx import GraphModule

from trainload.autograd_trace.compiling.inductor import prepare_graph
from trainload.autograd_trace.outlining.outline import NotOutlined, outline
from trainload.capture.source.patched import replaced
from trainload.launching.node.build import uncompiled_build
from trainload.launching.node.built_graphs import Built, BuiltGraph, Call
from trainload.launching.worker import preparation
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

NOTED = "regions.txt"
"""File in the folder of the ranks, to which each adds a line for each region of its graphs."""


def train_outlined(entries: Sequence[dict[str, Any]]) -> None:
    """Train the run of each entry with outlined graphs, which are interpreted."""

    def build(
        package: Package, plan: Plan, device: torch.device, index: int = 0, **options: Any
    ) -> Built:
        return uncompiled_build(package, plan, device, index, **options).replaced(_outlined)

    with replaced(preparation, "uncompiled_build", build):
        train_as_rank(entries)


def _outlined(graph: BuiltGraph) -> Call:
    module = graph.call
    assert isinstance(module, GraphModule), "an interpreted build has modules"
    prepare_graph(module)
    module.recompile()
    if not graph.outputs:
        return module  # an update, which writes in place
    try:
        result = outline(module)
    except NotOutlined as reason:
        raise AssertionError(f"{graph.name}: {reason}") from reason
    with Path(NOTED).open("a") as file:
        file.writelines(f"{graph.name} {region}\n" for region in result.regions)
    return result.module
