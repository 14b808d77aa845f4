"""Processes of one gloo group, for tests of what ranks do together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from trainload.launch.groups import leave_groups


def on_ranks(world: int, act: Callable[[int, int, Path], None], folder: Path) -> None:
    """Calls `act(rank, world, folder)`, a function of a module, in a process for each rank. Demands that all of them end well."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_in_group, args=(act, rank, world, folder), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=200)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world, f"the ranks ended with {codes}"


def _in_group(act: Callable[[int, int, Path], None], rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world}"), world)  # type: ignore[attr-defined]  # public, though not in __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    act(rank, world, folder)
    dist.barrier()
    leave_groups()
