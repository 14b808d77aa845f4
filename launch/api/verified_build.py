"""Compare the graphs of a build that was made without the device that it is for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from trainload.capture.job.ambient import neutrally
from trainload.core.errors import RequestError
from trainload.core.storage.places import path_here
from trainload.launching.api.compare_build import compare_parts
from trainload.launching.api.make_build import BuildReport, report_of
from trainload.launching.node.build_key import build_target, device_of, using_threads
from trainload.launching.node.fetched_builds import check_loadable
from trainload.launching.node.graph_comparison import forget_comparisons
from trainload.launching.node.write_build import Stages, write_parts
from trainload.packaging.builds.build_folder import check_build, copy_parts
from trainload.packaging.builds.build_record import BuildRecord, Target
from trainload.packaging.format.package_files import check_new_folder, check_outside_packages
from trainload.packaging.package import Package, check_weights
from trainload.packaging.signatures.build_makers import allows_builds, check_maker
from trainload.packaging.signatures.policy import find_policies
from trainload.sharding.planner.check_plan import check_plan
from trainload.sharding.plans.plan import Plan


@neutrally
def verify_build(
    build: str | Path,
    package: Package,
    plan: Plan,
    path: str | Path,
    *,
    deterministic: bool = True,
    on_stage: Callable[[str, float], None] = lambda *_: None,
) -> BuildReport:
    """Compare the graphs of a build with the interpreted ones on this machine, and write it again
    with the result.

    This loads the build, which is native code. If a policy of this machine names makers of builds,
    one of them must have signed it. What is written has no signature.

    Args:
        build: folder of a build, for this machine's device.
        package: the package, or a release with the same program.
        plan: the plan for which the build was made.
        path: folder to write.
        deterministic: value of the setting `deterministic` with which it was made.
        on_stage: called with (part, seconds) when each part is done.

    Raises:
        StorageError: there is no build, `path` is taken, or the disk is full.
        IntegrityError: the build is damaged, or a kernel cannot be loaded here.
        PolicyError: a policy does not trust its maker.
        PlanError: the plan was made for another package.
        RequestError: the build is for another job, device or toolchain, or of a pipeline.
        DataError: rows to compare the graphs on cannot be made, since the package does not record
            the range of values of an input.

    Example:
        plan = trainload.plan(package, trainload.Cluster(), "single")
        trainload.build(package, plan, "gpt.build")
        report = trainload.verify_build("gpt.build", package, plan, "gpt-verified.build")
        assert not report.unverified
    """
    build, path = path_here(build), path_here(path)
    check_outside_packages(path)
    check_new_folder(path)
    check_weights(package)
    check_plan(plan, package)
    if plan.pipeline is not None:
        raise RequestError(
            "graphs of a pipeline cannot be compared by one process, since its ranks wait for each"
            " other's messages",
            where="plan.pipeline",
            hint="A run on a machine with the device compiles and compares its own graphs.",
        )
    record, digest = check_build(build)
    threads = _threads(record)
    with using_threads(threads) if threads is not None else nullcontext():
        target = build_target(package, plan, device_of(plan), is_deterministic=deterministic)
    _check_fits(build, record, target)
    policies = find_policies()
    if allows_builds(policies):
        check_maker(build, record, digest, policies)
    stages = Stages(on_stage)
    with tempfile.TemporaryDirectory() as scratch:
        parts = copy_parts(build, record, Path(scratch))
        for folder in parts.values():
            forget_comparisons(folder)  # those of its maker
            check_loadable(folder)
        interpreted = compare_parts(package, plan, parts, stages, is_deterministic=deterministic)
        write_parts(path, package, plan, parts, threads, is_deterministic=deterministic)
    return report_of(path, stages.seconds, interpreted)


def _threads(record: BuildRecord) -> int | None:
    """Return the number of threads that a build's CPU kernels are compiled for; None on GPUs."""
    threads = record.target.architecture.get("threads")
    return threads if isinstance(threads, int) else None


def _check_fits(build: Path, record: BuildRecord, target: Target) -> None:
    different = record.target.difference(target)
    if different is not None:
        raise RequestError(
            "the build is not for this package, plan and machine",
            where=str(build),
            got=different,
            hint="Use the plan that it was made for, on a machine with its device.",
        )
