"""Make a build without a run: compile a package's graphs under a plan, and compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import CompileError, RequestError
from trainload.core.storage.places import path_here
from trainload.launching.api.compare_build import compare_parts
from trainload.launching.described.described_build import build_in_child
from trainload.launching.described.described_gpu import described, is_this_machines
from trainload.launching.node.build import can_compile
from trainload.launching.node.graph_comparison import Comparison
from trainload.launching.node.write_build import (
    Stages,
    compiled_parts,
    failed_graphs,
    write_parts,
)
from trainload.packaging.builds.build_folder import read_build
from trainload.packaging.builds.build_record import Target
from trainload.packaging.format.package_files import check_new_folder, check_outside_packages
from trainload.packaging.package import Package, check_weights
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.planner.device import DeviceProfile
from trainload.sharding.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Result of `build`.

    Attributes:
        path: folder of the build.
        target: what the graphs fit.
        graphs: number of graphs.
        unverified: graphs that were not compared with the interpreted ones, so that no run loads
            the build.
        interpreted: for each graph that runs interpreted, the reason.
        bytes: total size of the files.
        seconds: duration of each part.

    Example:
        plan = trainload.plan(package, trainload.Cluster(), "single")
        report = trainload.build(package, plan, "gpt.build")
        print(report.bytes, report.unverified, report.interpreted)
    """

    path: Path
    target: Target
    graphs: int
    unverified: tuple[str, ...]
    interpreted: tuple[str, ...]
    bytes: int
    seconds: dict[str, float]


@neutrally
def build(
    package: Package,
    plan: Plan,
    path: str | Path,
    *,
    threads: int | None = None,
    device: str | None = None,
    deterministic: bool = True,
    on_stage: Callable[[str, float], None] = lambda *_: None,
) -> BuildReport:
    """Compile a package's graphs under a plan, compare them with the interpreted graphs, and write
    them as a build.

    A build that is signed (`sign`) and pushed to the package's store (`push`) is loaded by runs of
    every release with the same program whose policies trust its maker; they then compile nothing.
    It fits machines of this one's architecture with the same releases of torch, Python and the
    compiler. See docs/guides/builds.md.

    With `device` a machine without a GPU makes builds for one. Nothing is computed then, so that
    the graphs are unverified until `verify_build` has compared them on such a GPU.

    Args:
        package: the package. Its weights do not matter for the build.
        plan: plan of the runs.
        path: folder to write.
        threads: number of threads of a worker, which CPU kernels are compiled for. None: the share
            of a worker in this machine's cores.
        device: "cpu", or a GPU of `trainload plan --device`, such as "h100", which this machine
            need not have. None: this machine's device of the plan's kind.
        deterministic: value of the setting `deterministic` of the runs.
        on_stage: called with (part, seconds) when each part is done.

    Raises:
        StorageError: `path` is taken, or a disk is full.
        PlanError: the plan was made for another package, or there is no such device.
        CompileError: there is no compiler, or the process for a described GPU has ended.
        RequestError: `threads` is passed for GPUs, the plan is for devices of another kind, this
            machine has no GPU, or it cannot compile for the described one.
        DataError: rows to compare the graphs on cannot be made, since the package does not record
            the range of values of an input.

    Example:
        plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
        report = trainload.build(package, plan, "gpt-zero3.build")
        assert not report.unverified
    """
    path = path_here(path)
    check_outside_packages(path)
    check_new_folder(path)
    check_weights(package)
    check_plan(plan, package)
    if not can_compile():
        raise CompileError("no C++ compiler was found", where="build", hint="Install g++.")
    if threads is not None and plan.cluster.device != "cpu":
        raise RequestError(
            "kernels for GPUs do not depend on the number of threads",
            where="threads",
            hint="Omit it, or use a plan for CPUs.",
        )
    gpu = _described(plan, device)
    if gpu is not None:
        seconds = build_in_child(package, plan, path, gpu, on_stage, is_deterministic=deterministic)
        return report_of(path, seconds, failed_graphs(path))
    if plan.cluster.device != "cpu" and not torch.cuda.is_available():
        raise RequestError(
            "this machine has no GPU",
            where="device",
            hint="Name the GPU for which the graphs are compiled, such as h100.",
        )
    stages = Stages(on_stage)
    parts = compiled_parts(package, plan, threads, stages, is_deterministic=deterministic)
    interpreted = compare_parts(package, plan, parts, stages, is_deterministic=deterministic)
    write_parts(path, package, plan, parts, threads, is_deterministic=deterministic)
    return report_of(path, stages.seconds, interpreted)


def _described(plan: Plan, device: str | None) -> DeviceProfile | None:
    """Return the GPU to describe; None if graphs are compiled for a device of this machine.

    Raises:
        RequestError, PlanError: as `build`.
    """
    if device is None:
        return None
    profile = None if device == "cpu" else described(device)
    kind = "cpu" if profile is None else profile.kind
    if kind != plan.cluster.device:
        raise RequestError(
            "the plan is for devices of another kind",
            where="device",
            expected=plan.cluster.device,
            got=device,
            hint="Make a plan for it: trainload plan --device.",
        )
    return None if profile is None or is_this_machines(profile) else profile


def report_of(
    path: Path, seconds: Mapping[str, float], interpreted: Sequence[Comparison | str]
) -> BuildReport:
    """Return the report of the build that was written to `path`."""
    record, _ = read_build(path)
    return BuildReport(
        path=path,
        target=record.target,
        graphs=len(record.compiled),
        unverified=record.unverified,
        interpreted=tuple(map(str, interpreted)),
        bytes=record.bytes,
        seconds={name: round(value, 3) for name, value in seconds.items()},
    )
