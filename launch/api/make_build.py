"""Make a build without a run: compile a package's graphs under a plan, and compare them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import CompileError, RequestError
from trainload.core.records import now
from trainload.core.versions import VERSION
from trainload.launching.api.compare_build import compare_alone
from trainload.launching.node.build import can_compile, compile_build, compiled_graphs
from trainload.launching.node.build_key import build_target, device_of, threads_of, using_threads
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.graph_comparison import Comparison, read_comparison
from trainload.packaging.builds.build_folder import file_entries, write_build
from trainload.packaging.builds.build_record import BuildRecord, Target
from trainload.packaging.format.package_files import check_new_folder, check_outside_packages
from trainload.packaging.package import Package, check_weights
from trainload.sharding.planner.check_plan import check_plan
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
    on_stage: Callable[[str, float], None] = lambda *_: None,
) -> BuildReport:
    """Compile a package's graphs under a plan, compare them with the interpreted graphs, and write
    them as a build.

    A build that is signed (`sign`) and pushed to the package's store (`push`) is loaded by runs of
    every release with the same program whose policies trust its maker; they then compile nothing.
    It fits machines of this one's architecture with the same releases of torch, Python and the
    compiler. See docs/builds.md.

    Args:
        package: the package. Its weights do not matter for the build.
        plan: plan of the runs.
        path: folder to write.
        threads: number of threads of a worker, which CPU kernels are compiled for. None: the share
            of a worker in this machine's cores.
        on_stage: called with (part, seconds) when each part is done.

    Raises:
        StorageError: `path` is taken, or a disk is full.
        PlanError: the plan was made for another package.
        CompileError: there is no C++ compiler.
        RequestError: `threads` is passed for GPUs.
        DataError: rows to compare the graphs on cannot be made, since the package does not record
            the range of values of an input.

    Example:
        plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero3")
        report = trainload.build(package, plan, "gpt-zero3.build")
        assert not report.unverified
    """
    path = Path(path)
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
    cache, device = default_cache_dir(), device_of(plan)
    if threads is None:
        threads = threads_of(min(plan.world_size, plan.cluster.devices_per_node))
    seconds: dict[str, float] = {}
    interpreted: list[Comparison] = []

    def report(stage: str, spent: float) -> None:
        seconds[stage] = seconds.get(stage, 0.0) + spent
        on_stage(stage, spent)

    with using_threads(threads):
        target = build_target(package, plan, device)
        parts = {
            index: compile_build(package, plan, device, cache, report, index)
            for index in range(plan.pipeline_ranks)
        }
        for folder in parts.values():
            began = time.perf_counter()
            compare_alone(package, plan, folder, cache, interpreted.append)
            report("compare", time.perf_counter() - began)
    compiled = [(folder, name) for folder in parts.values() for name in compiled_graphs(folder)]
    unverified = {name for folder, name in compiled if read_comparison(folder, name) is None}
    record = BuildRecord(
        target=target,
        release=VERSION,
        compiled=tuple(sorted({name for _, name in compiled})),
        unverified=tuple(sorted(unverified)),
        files=file_entries(parts),
        created=now(),
    )
    write_build(path, record, parts)
    return BuildReport(
        path=path,
        target=target,
        graphs=len(record.compiled),
        unverified=record.unverified,
        interpreted=tuple(map(str, interpreted)),
        bytes=record.bytes,
        seconds={name: round(value, 3) for name, value in seconds.items()},
    )
