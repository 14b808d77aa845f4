"""Compile the graphs of a build into the node's cache, and write them to a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainload.core.records import now
from trainload.core.versions import VERSION
from trainload.launching.node.build import compile_build, compiled_graphs
from trainload.launching.node.build_key import build_target, device_of, threads_of, using_threads
from trainload.launching.node.cache import default_cache_dir
from trainload.launching.node.graph_comparison import read_comparison
from trainload.packaging.builds.build_folder import file_entries, write_build
from trainload.packaging.builds.build_record import INDEX_FILE, BuildRecord
from trainload.packaging.package import Package
from trainload.sharding.plans.plan import Plan


class Stages:
    """Durations of the parts of a build.

    Args:
        on_stage: called with (part, seconds) when each part is done.

    Attributes:
        seconds: part -> total duration.
    """

    def __init__(self, on_stage: Callable[[str, float], None]) -> None:
        self._on_stage = on_stage
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, seconds: float) -> None:
        """Add a duration."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self._on_stage(stage, seconds)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the duration of the context."""
        began = time.perf_counter()
        yield
        self(stage, time.perf_counter() - began)


def compiled_parts(
    package: Package,
    plan: Plan,
    threads: int | None,
    on_stage: Callable[[str, float], None],
    *,
    is_deterministic: bool = True,
) -> dict[int, Path]:
    """Compile the graphs of a package under a plan, unless this machine's cache has them.

    Args:
        package: the package.
        plan: plan of the runs.
        threads: number of threads of a worker; None: its share of this machine's cores.
        on_stage: called with (part, seconds) when each part is done.
        is_deterministic: True if every call of the graphs must give the same bits.

    Returns:
        Index on the pipeline axis -> folder in the cache.
    """
    cache, device = default_cache_dir(), device_of(plan)
    with using_threads(_threads(plan, threads)):
        return {
            index: compile_build(
                package, plan, device, cache, on_stage, index, is_deterministic=is_deterministic
            )
            for index in range(plan.pipeline_ranks)
        }


def write_parts(
    path: Path,
    package: Package,
    plan: Plan,
    parts: Mapping[int, Path],
    threads: int | None,
    *,
    is_deterministic: bool = True,
) -> None:
    """Write compiled graphs as a build; those without a comparison are unverified.

    Args:
        path: a folder that does not exist.
        package: as for `compiled_parts`.
        plan: as for `compiled_parts`.
        parts: result of `compiled_parts`.
        threads: as for `compiled_parts`.
        is_deterministic: as for `compiled_parts`.

    Raises:
        StorageError: `path` is taken, or the disk is full.
    """
    with using_threads(_threads(plan, threads)):
        target = build_target(package, plan, device_of(plan), is_deterministic=is_deterministic)
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


def failed_graphs(path: Path) -> list[str]:
    """Describe the graphs of a build's folder that could not be compiled and run interpreted."""
    return [
        f"graph {name} cannot be compiled: {reason}"
        for index in sorted(path.glob(f"*/{INDEX_FILE}"))
        for name, reason in json.loads(index.read_bytes())["failed"].items()
    ]


def _threads(plan: Plan, threads: int | None) -> int:
    return threads or threads_of(min(plan.world_size, plan.cluster.devices_per_node))
