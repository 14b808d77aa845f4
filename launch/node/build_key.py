"""The target of a build: all that its compiled graphs depend on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.launching.node.architecture import architecture_of, toolchain_of
from trainload.packaging.builds.build_record import Target
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan

BUILD_VERSION = 24
"""Part of every build's job.

Increase it when the graphs made from the same package and plan, or their compilation, change.
"""
_SHAPING = {
    "strategy",
    "shard_ranks",
    "accumulate",
    "prefetch",
    "buckets",
    "tensor_ranks",
    "tensor_shards",
    "divide",
    "pipeline",
    "batch_norm",
    "recompute",
    "loss_chunks",
    "offload",
}


def device_of(plan: Plan) -> torch.device:
    """Return the device of every rank.

    Each sees one GPU only, so that a compiled graph, which names its device, fits all.
    """
    return torch.device("cpu") if plan.cluster.device == "cpu" else torch.device("cuda", 0)


def build_target(
    package: Package,
    plan: Plan,
    device: torch.device,
    *,
    evaluates: bool = True,
    threads: int | None = None,
    is_deterministic: bool = True,
) -> Target:
    """Return what a build for a device of this machine depends on.

    That is the program, its graphs, the parts of the plan that determine them, the versions of what
    compiles them, and the architecture, which on CPUs includes the number of threads of a worker
    (by default, those of this process). Graphs that need not be deterministic are others.
    """
    job: dict[str, Any] = {
        "build": BUILD_VERSION,
        "program": _without_rates(package.manifest).program_digest,
        "graphs": package.manifest.step_graphs(evaluates=evaluates),
        "plan": plan.model_dump(mode="json", include=_SHAPING) | {"world": plan.world_size},
    }
    if not is_deterministic:
        job["deterministic"] = False
    if device.type == "cuda":  # kernels for GPUs are made for calls of up to this size
        job["rows"] = plan.rows_per_call
    return Target(
        job=sha256_bytes(canonical_json(job)),
        toolchain=toolchain_of(device),
        architecture=architecture_of(device, threads),
    )


def build_name(target: Target, pipeline_index: int) -> str:
    """Return the name, in the node's cache, of the graphs for a target of the ranks with an index
    on the pipeline axis.
    """
    return f"{target.key}-{pipeline_index}"


def _without_rates(manifest: Manifest) -> Manifest:
    """Return a manifest with neutral values for what no graph depends on: learning rates (inputs of
    updates), seed, steps.
    """
    groups = tuple(
        group.model_copy(update={"learning_rates": (0.0,), "schedule": None})
        for group in manifest.recipe.groups
    )
    recipe = manifest.recipe.model_copy(
        update={"groups": groups, "schedules": (), "seed": 0, "steps": 1}
    )
    return manifest.model_copy(update={"recipe": recipe})


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Use a number of threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_of(local_world: int) -> int:
    """Return the number of threads of each worker on a node: its share of the cores.

    CPU kernels are compiled for this number.
    """
    return max(1, len(os.sched_getaffinity(0)) // local_world)
