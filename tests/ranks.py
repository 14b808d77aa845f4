"""Processes of one gloo group, for tests of what ranks do together.

They are forked from a server that has torch and trainload imported: a rank begins in milliseconds where an interpreter takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainload.launch.groups import leave_groups

PRELOADED = ("torch", "torch.distributed", "trainload.api", "trainload.running", "trainload.launch.worker", "tests.laws.gpt")
SECONDS = 200.0


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from this process's server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def on_ranks(world: int, act: Callable[[int, int, Path], None], folder: Path) -> None:
    """Call `act(rank, world, folder)`, a function of a module, in a process for each rank. Demand that all of them end well."""
    context = fork_server()
    processes = [context.Process(target=_in_group, args=(act, rank, world, folder), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    end(processes)
    assert codes == [0] * world, f"the ranks ended with {codes}"


def start(act: Callable[..., None], *arguments: Any, cwd: Path, log: Path, variables: Mapping[str, str]) -> ForkServerProcess:
    """Start `act(*arguments)`, a function of a module, in a process with this environment, whose output goes to `log`."""
    process = fork_server().Process(target=_as_command, args=(act, arguments, cwd, log, dict(variables)))
    process.start()
    return process


def end(processes: Sequence[ForkServerProcess]) -> None:
    """Kill what is left of some processes."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _as_command(act: Callable[..., None], arguments: Sequence[Any], cwd: Path, log: Path, variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    act(*arguments)


def _in_group(act: Callable[[int, int, Path], None], rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world}"), world)  # type: ignore[attr-defined]  # public, though not in __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    act(rank, world, folder)
    dist.barrier()
    leave_groups()
