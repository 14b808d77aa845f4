"""Measure the performance of this machine for the planner (`trainload measure`)."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainload.core.errors import ClusterError
from trainload.core.processes import termination_signals_ignored
from trainload.launching.node.process_groups import leave_groups
from trainload.sharding.planner.device import DeviceProfile, Link, Measured
from trainload.sharding.plans.plan import DeviceKind

c10d = torch.ops._c10d_functional
SIZES = tuple(4**power for power in range(5, 13))
"""Sizes in bytes of the collectives that are timed, from 1 KiB to 16 MiB."""
OPERATORS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
_MEASURING_SECONDS = 0.2
_TIMEOUT_SECONDS = 300.0


def measure(
    kind: DeviceKind, name: str, ranks: int, say: Callable[[str], None] = lambda _: None
) -> DeviceProfile:
    """Measure the profile of this machine's devices.

    Args:
        kind: kind of the devices.
        name: name of the profile.
        ranks: number of processes with which the links are measured; with GPUs, each uses its own.
            With one process there is no link, and the memory's bandwidth is used instead.
        say: called with a description of each measurement.

    Raises:
        ClusterError: there are too few devices, or a process failed or did not end.
    """
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        raise ClusterError(
            "there are not enough GPUs", expected=str(ranks), got=str(torch.cuda.device_count())
        )
    # initializes the device, so that its context counts as reserved memory
    torch.zeros(1, device=device)
    reserved = _reserved_bytes(device)
    say("matrix products")
    flops = {
        str(dtype).removeprefix("torch."): products(device, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    say("attention")
    attention = min(
        1.0, _attention_rate(device) / flops["float32" if kind == "cpu" else "bfloat16"]
    )
    say("memory, and the link to the host" if kind == "cuda" else "memory")
    speed, kernel = _memory_bandwidth(device), _kernel_seconds(device)
    say(f"collectives of {ranks} processes")
    timed = _measure_collectives(kind, ranks) if ranks > 1 else ()
    link = fit(timed) if timed else Link(seconds=0.0, bytes_per_second=speed)
    total = (
        torch.cuda.get_device_properties(device).total_memory
        if kind == "cuda"
        else _machine_bytes() // ranks
    )
    return DeviceProfile(
        name=name,
        kind=kind,
        source=(
            f"trainload measure: {_describe_device(device)}, torch {torch.__version__}, {ranks}"
            " processes; network: as within a node"
        ),
        memory_bytes=total,
        reserved_bytes=reserved,
        flops=flops,
        attention=attention,
        memory_bytes_per_second=speed,
        kernel_seconds=kernel,
        node=link,
        network=link,
        host=_host_link(device) if kind == "cuda" else None,
        collectives=timed,
    )


def fit(timed: Sequence[Measured]) -> Link:
    """Fit a link to ring collectives that were measured: latency from the smallest messages,
    bandwidth from the largest.
    """
    small, large = (
        min(measurement.bytes for measurement in timed),
        max(measurement.bytes for measurement in timed),
    )
    latency = median(
        measurement.seconds / (_ring_passes(measurement) * (measurement.ranks - 1))
        for measurement in timed
        if measurement.bytes == small
    )
    speeds = [
        _ring_passes(measurement)
        * measurement.bytes
        * (measurement.ranks - 1)
        / measurement.ranks
        / max(
            measurement.seconds - _ring_passes(measurement) * (measurement.ranks - 1) * latency,
            1e-9,
        )
        for measurement in timed
        if measurement.bytes == large
    ]
    return Link(seconds=latency, bytes_per_second=median(speeds))


def _ring_passes(timed: Measured) -> int:
    return 2 if timed.operator == "all_reduce" else 1


def _time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the median duration of a call in seconds, over a short time, after one warm-up
    call.
    """
    finish = torch.cuda.synchronize if device.type == "cuda" else _do_nothing
    call()
    finish()
    durations: list[float] = []
    until = time.perf_counter() + _MEASURING_SECONDS
    while time.perf_counter() < until or len(durations) < 3:
        began = time.perf_counter()
        call()
        finish()
        durations.append(time.perf_counter() - began)
    return median(durations)


def _do_nothing() -> None:
    pass


def products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of large matrix products on a device.

    Smaller matrices are used if large ones would be slow, as for float16 on most CPUs, which have
    no instructions for it.
    """
    small, large = (1024, 8192) if device.type == "cuda" else (256, 1024)
    seconds = _time_product(device, dtype, small)
    if seconds * (large / small) ** 3 > _MEASURING_SECONDS:
        return 2.0 * small**3 / seconds
    return 2.0 * large**3 / _time_product(device, dtype, large)


def _time_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _time_call(functools.partial(torch.mm, left, right), device)


def _attention_rate(device: torch.device) -> float:
    rows, length, dtype = (
        (4, 4096, torch.bfloat16) if device.type == "cuda" else (1, 1024, torch.float32)
    )
    query, key, value = (
        torch.randn(rows, 16, length, 64, device=device, dtype=dtype) for _ in range(3)
    )
    seconds = _time_call(lambda: functional.scaled_dot_product_attention(query, key, value), device)
    return 4.0 * rows * 16 * length * length * 64 / seconds


def _memory_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that an addition of large tensors reads and writes."""
    first, second = (
        torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device) for _ in range(2)
    )
    result = torch.empty_like(first)
    return 3.0 * first.nbytes / _time_call(lambda: torch.add(first, second, out=result), device)


def _kernel_seconds(device: torch.device) -> float:
    """Return the duration in seconds of a trivial operator that is called many times in a row."""
    value = torch.zeros(16, device=device)

    def many() -> Tensor:
        for _ in range(100):
            value.add_(1)
        return value

    return _time_call(many, device) / 100


def _host_link(device: torch.device) -> Link:
    """Return the link between a GPU and pinned memory of the host: the slower direction."""
    seconds: list[float] = []
    speeds: list[float] = []
    for size, found in ((64, seconds), (2**28, speeds)):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        value = torch.empty(size, dtype=torch.uint8, device=device)
        for to, source in ((host, value), (value, host)):
            copy = functools.partial(to.copy_, source, non_blocking=True)
            found.append(_time_call(copy, device))
    return Link(seconds=max(seconds), bytes_per_second=2**28 / max(speeds))


def _measure_collectives(kind: DeviceKind, ranks: int) -> tuple[Measured, ...]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measured.json"
        processes = [
            context.Process(target=_measure_rank, args=(kind, rank, ranks, folder), daemon=True)
            for rank in range(ranks)
        ]
        try:
            # Ctrl-C reaches the whole process group: the children leave it to their parent
            with termination_signals_ignored():
                for process in processes:
                    process.start()
            until = time.monotonic() + _TIMEOUT_SECONDS
            for process in processes:
                process.join(max(0.0, until - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        if any(codes) or None in codes:
            raise ClusterError(
                "the processes that measure collectives failed",
                expected="exit codes 0",
                got=str(codes),
            )
        return tuple(
            Measured.model_validate(measurement) for measurement in json.loads(result.read_text())
        )


def _measure_rank(kind: DeviceKind, rank: int, ranks: int, folder: str) -> None:
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)  # type: ignore[attr-defined]  # public, though not in __all__
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=ranks
    )
    measurements = [
        _measure_collective(operator, size, ranks, device)
        for size in SIZES
        for operator in OPERATORS
    ]
    if rank == 0:
        (Path(folder) / "measured.json").write_text(
            json.dumps([measurement.model_dump() for measurement in measurements])
        )
    dist.barrier()
    leave_groups()


def _measure_collective(operator: str, size: int, ranks: int, device: torch.device) -> Measured:
    length = size // 4 // ranks * ranks
    whole, part = torch.zeros(length, device=device), torch.zeros(length // ranks, device=device)

    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name

    def call() -> None:  # the same operators that rank graphs call
        if operator == "all_reduce":
            flying = c10d.all_reduce.default(whole, "sum", group)
        elif operator == "all_gather_into_tensor":
            flying = c10d.all_gather_into_tensor.default(part, ranks, group)
        else:
            flying = c10d.reduce_scatter_tensor.default(whole, "sum", ranks, group)
        c10d.wait_tensor.default(flying)
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()
    rounds = 20 if size <= 2**20 else 5
    dist.barrier()
    took: list[float] = []
    for _ in range(rounds):  # a fixed number, since it must be the same on every rank
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return Measured(operator=operator, ranks=ranks, bytes=length * 4, seconds=median(took))


def _reserved_bytes(device: torch.device) -> int:
    """Return the bytes of memory that this process uses besides tensors."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, total - free - torch.cuda.memory_reserved(device))
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{os.cpu_count()} cores of {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    )
