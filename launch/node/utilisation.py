"""Model FLOPs utilization (MFU) of a run: the operations of its step graphs, relative to the peak
rate of its devices.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from trainload.autograd_trace.graphs import Recipe, StepGraph
from trainload.autograd_trace.optimizer.rounds import calls_of
from trainload.capture.program import Mode, graph_name
from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json
from trainload.launching.node.cache import private_folder
from trainload.launching.node.measure import products
from trainload.packaging.package import Package
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.planner.device import profile_of_product
from trainload.sharding.planner.plan_costs import sizes_of
from trainload.sharding.plans.plan import Plan

Work = Mapping[str, Mapping[str, tuple[float, float]]]
"""Captured graph -> dtype -> operations of matrix products in a call: (constant part, part for each
row).
"""


def work_of(steps: Mapping[str, StepGraph], rows: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the operations of step graphs, without division among ranks and without recomputation.

    Args:
        steps: step graphs by the name of the captured graph.
        rows: number of rows of a call. Near it, the operations are assumed to be linear in the
            rows.
    """
    work: dict[str, dict[str, tuple[float, float]]] = {}
    for name, step in steps.items():
        here, there = _operations(step, rows), _operations(step, 2 * rows)
        work[name] = {
            dtype: (2 * here[dtype] - there[dtype], (there[dtype] - here[dtype]) / rows)
            for dtype in here
        }
    return work


def dtypes_of(work: Work) -> set[str]:
    """Return the dtypes of the matrix products."""
    return {dtype for by_dtype in work.values() for dtype in by_dtype}


def _operations(step: StepGraph, rows: int) -> dict[str, float]:
    sizes = sizes_of(step.module, step.inputs, rows)
    by_dtype: dict[str, float] = {}
    for node in step.module.graph.nodes:
        if count := flops(node, sizes):
            value = node.meta["val"]
            first = next(
                tensor
                for tensor in (value if isinstance(value, tuple | list) else (value,))
                if tensor is not None
            )
            dtype = str(first.dtype).removeprefix("torch.")
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + count
    return by_dtype


class Utilisation:
    """Model FLOPs utilization of a run's steps.

    Args:
        work: operations of the run's step graphs.
        recipe: recipe of the run.
        plan: plan of the run.
        peaks: dtype -> peak operations per second of one device, from `peaks_of`.
    """

    def __init__(self, work: Work, recipe: Recipe, plan: Plan, peaks: Mapping[str, float]) -> None:
        self._work, self._recipe, self._plan, self._peaks = work, recipe, plan, peaks

    def of(self, step: int, variants: Sequence[str], seconds: float) -> float:
        """Return the utilization of a step: the model's operations relative to the devices' peak in
        this time.

        Args:
            step: number of the step.
            variants: variants of its global batches.
            seconds: duration of the step.
        """
        plan = self._plan
        calls = plan.global_batch / plan.rows_per_call
        busy = 0.0
        for call in calls_of(self._recipe, step):
            work = self._work[graph_name(call.graph, Mode.TRAIN, variants[call.draw])]
            for dtype, (fixed, each_row) in work.items():
                busy += calls * (fixed + each_row * plan.rows_per_call) / rate(self._peaks, dtype)
        return busy / plan.world_size / seconds


def rate(peaks: Mapping[str, float], dtype: str) -> float:
    """Return the peak operations per second for a dtype; for an unknown dtype, those for
    float32.
    """
    return peaks.get(dtype) or peaks["float32"]


def peaks_of(device: torch.device, dtypes: Iterable[str], cache_dir: Path) -> dict[str, float]:
    """Return the peak operations per second of a device by dtype.

    They are from its data sheet (sharding/planner/devices). For a device without one, the rate of
    large matrix products is measured once and stored in the node's cache.

    Args:
        device: device of this process. For a CPU, the process's number of threads counts.
        dtypes: dtypes of the run's products. The result always contains float32.
        cache_dir: the node's cache.
    """
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}-{torch.get_num_threads()}"
    )
    profile = profile_of_product(name) if device.type == "cuda" else None
    if profile is not None and profile.peak_flops:
        return dict(profile.peak_flops)
    folder = private_folder(cache_dir / "peaks")
    path = (
        folder / f"{socket.gethostname()}-{name.replace(os.sep, '-')}-torch{torch.__version__}.json"
    )
    peaks: dict[str, float] = json.loads(path.read_bytes()) if path.exists() else {}
    lacking = {"float32", *dtypes} - peaks.keys()
    if lacking:
        peaks |= {dtype: products(device, getattr(torch, dtype)) for dtype in sorted(lacking)}
        replace_file(path, canonical_json(peaks))
    return peaks


def used_bytes(device: torch.device) -> int:
    """Return the memory usage of this process in bytes: on a GPU, reserved by torch's allocator; on
    a CPU, resident.
    """
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    with Path("/proc/self/statm").open("rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tokens_per_row(package: Package) -> int | None:
    """Return the number of tokens of a row of a package's data; None if rows have no tokens, or
    differ in length.
    """
    if package.manifest.variants:  # their rows may differ in length
        return None
    for entry in package.manifest.data_inputs().values():
        if "int" in entry.dtype and len(entry.shape) == 2 and isinstance(entry.shape[1], int):
            return entry.shape[1]
    return None


class StepClock:
    """Running means of the duration and the number of rows of steps.

    Args:
        tokens_per_row: number of tokens of a row; None if it is unknown.
    """

    def __init__(self, tokens_per_row: int | None) -> None:
        self._tokens = tokens_per_row
        self._means: tuple[float, float] | None = None
        self._last = time.perf_counter()

    def skip(self) -> None:
        """Exclude the time since the last tick from the rates."""
        self._last = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Exclude a number of seconds since the last tick from the rates."""
        self._last += seconds

    def tick(self, steps_left: int, rows: int) -> dict[str, float]:
        """Record the end of a step with a number of rows; return its duration, the rates and the
        seconds left.
        """
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        before = self._means or (seconds, float(rows))
        self._means = (0.9 * before[0] + 0.1 * seconds, 0.9 * before[1] + 0.1 * rows)
        rate = self._means[1] / self._means[0]
        rates = {
            "seconds": seconds,
            "rows_per_second": rate,
            "seconds_left": self._means[0] * steps_left,
        }
        if self._tokens is not None:
            rates["tokens_per_second"] = rate * self._tokens
        return rates
