"""Processes of a gloo group, for tests of what ranks do together.

They are forked from a server that has imported torch and trainload: a rank starts in milliseconds,
an interpreter would take seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from trainload.core.processes import end_with_parent
from trainload.launching.node.process_groups import leave_groups

PRELOADED = (
    "torch",
    "torch.distributed",
    "trainload.freezing.freeze",
    "trainload.launching.api.launch",
    "trainload.launching.worker.loop",
    "tests.laws.gpt",
)
SECONDS = 500.0
"""Time limit of a process: below pytest's own, and far above what any needs on a busy machine."""


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from this process's fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def on_ranks(
    world: int,
    act: Callable[[int, int, Path], None],
    folder: Path,
    prepare: Callable[[Path], object] | None = None,
) -> None:
    """Call `act(rank, world, folder)` in a process for each rank, and check that all succeed.

    act: a module-level function.
    prepare: called with the folder in the process from which the ranks are forked, so that they
        inherit its caches. If it uses autograd, the ranks cannot: torch's autograd does not
        survive a fork.
    """
    parent = fork_server().Process(
        target=_fork_ranks, args=(act, world, folder, prepare), daemon=True
    )
    parent.start()
    parent.join(SECONDS)
    code = parent.exitcode
    end([parent])
    assert code == 0, f"a rank ended with {code}"


def start(
    act: Callable[..., None], *arguments: Any, cwd: Path, log: Path, variables: Mapping[str, str]
) -> ForkServerProcess:
    """Start `act(*arguments)` in a process with this environment, and write its output to `log`.

    `act` is a module-level function.
    """
    process = fork_server().Process(
        target=_as_command, args=(act, arguments, cwd, log, dict(variables))
    )
    process.start()
    return process


def ran(
    act: Callable[..., None],
    *arguments: Any,
    cwd: Path,
    seconds: float = SECONDS,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int | None, str]:
    """Call `act(*arguments)` in a new process, which is killed after `seconds`.

    act: a module-level function.
    variables: environment variables, in addition to those of this process.

    Returns:
        Exit status and output of the process.
    """
    log = cwd / "told"
    process = start(act, *arguments, cwd=cwd, log=log, variables={**os.environ, **variables})
    process.join(seconds)
    end([process])
    return process.exitcode, log.read_text()


def end(processes: Sequence[ForkServerProcess]) -> None:
    """Kill the processes that are still running."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _as_command(
    act: Callable[..., None],
    arguments: Sequence[Any],
    cwd: Path,
    log: Path,
    variables: Mapping[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    act(*arguments)


def _fork_ranks(
    act: Callable[[int, int, Path], None],
    world: int,
    folder: Path,
    prepare: Callable[[Path], object] | None,
) -> None:
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(folder)
    children = {os.fork() or _run_rank(act, rank, world, folder) for rank in range(world)}
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(codes, key=abs))


def _run_rank(
    act: Callable[[int, int, Path], None], rank: int, world: int, folder: Path
) -> NoReturn:
    code = 1
    try:
        end_with_parent()
        _in_group(act, rank, world, folder)
        code = 0
    except BaseException:  # noqa: BLE001  # a forked child must not continue with what its parent does
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _in_group(act: Callable[[int, int, Path], None], rank: int, world: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / f"store{world}"), world)  # type: ignore[attr-defined]  # public, though not in __all__
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    act(rank, world, folder)
    dist.barrier()
    leave_groups()
