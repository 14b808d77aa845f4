"""Save checkpoints to a URL in child processes that are killed before a write or removal.

A test runs this. For n = first, first + stride, ..., a child is killed by SIGKILL before its n-th
write or removal. A line is printed for each child: n, whether it was killed, the visible steps, how
many of them are complete, and the number of files left after the next attempt has started that no
checkpoint needs.

The next child collects these numbers before it begins: only children use the server, as fsspec's
thread does not survive a fork.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import s3fs  # noqa: F401  # imported once, not in each child
import torch
from tests.launch.checkpoint_cases import make_plan, save_in, writers
from tests.launch.checkpoint_places import Kept

from trainload.core.errors import CheckpointError
from trainload.core.storage.remote_files import RemoteFiles, RemoteUpload
from trainload.launching.checkpoints.reader import Checkpoint

PLAN = make_plan("zero3", 2)


def save_until_killed(kept: Kept, at: int) -> None:
    left, lock = at, threading.Lock()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal left
            with lock:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments)

        return call

    RemoteFiles.replace = counted(RemoteFiles.replace)  # type: ignore[method-assign]
    RemoteFiles.delete = counted(RemoteFiles.delete)  # type: ignore[method-assign]
    RemoteUpload.finish = counted(RemoteUpload.finish)  # type: ignore[method-assign]
    for step in (10, 20, 20, 30):  # step 20 twice: the second checkpoint replaces the first
        save_in(kept.place, PLAN, step, salt=step, keep_last=2)


def look(kept: Kept) -> str:
    visible = kept.place.published()
    whole = 0
    for where in visible.values():
        try:
            Checkpoint.open(where).verify()
            whole += 1
        except CheckpointError:
            continue
    writers(kept.place, PLAN, attempt="t2")
    needed = {f"step-{step:08}/index.json" for step in visible}
    for step, where in visible.items():
        needed |= {f"step-{step:08}/{file.name}" for file in Checkpoint.open(where).index.files}
    return f"{','.join(map(str, visible)) or '-'} {whole} {len(set(kept.files()) - needed)}"


def in_child(act: Callable[[], None]) -> bool:
    """Call `act` in a child process. Return whether the child was killed."""
    child = os.fork()
    if child == 0:
        act()
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def main(url: str, first: int, stride: int) -> None:
    """Kill children until one ends by itself."""
    torch.set_num_threads(1)
    at, killed, before = first, True, list[Callable[[], None]]()
    while killed:
        kept = Kept(f"{url}/{at}")
        killed = in_child(partial(each, [*before, partial(save_until_killed, kept, at)]))
        before = [partial(tell, kept, at, killed)]
        at += stride
    in_child(before[0])


def each(acts: Sequence[Callable[[], None]]) -> None:
    for act in acts:
        act()


def tell(kept: Kept, at: int, killed: bool) -> None:
    print(at, killed, look(kept), flush=True)
