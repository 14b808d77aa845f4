"""Save checkpoints in child processes that are killed at a file operation.

A test runs this. For n = first, first + stride, ..., a child is killed by SIGKILL at its n-th file
operation. A line is printed for each child: n, whether it was killed, the visible steps, how many
of them are complete, and the number of drafts left after the next attempt has started.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from tests.launch.checkpoint_cases import make_plan, save_all, writers

from trainload.core.errors import CheckpointError
from trainload.launching.checkpoints.index import published
from trainload.launching.checkpoints.reader import Checkpoint

PLAN = make_plan("zero3", 2)
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def save_until_killed(run: Path, at: int) -> None:
    count = 0

    def count_down(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(run) in str(args[0]):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_down)
    for step in (10, 20, 20, 30):  # step 20 twice: the second checkpoint replaces the first
        save_all(run, PLAN, step, salt=step, keep_last=2)


def is_whole(path: Path) -> bool:
    try:
        Checkpoint.open(path).verify()
    except CheckpointError:
        return False
    return True


def main(folder: Path, first: int, stride: int) -> None:
    """Kill children until one ends by itself."""
    torch.set_num_threads(1)
    at, killed = first, True
    while killed:
        run = folder / str(at)
        child = os.fork()
        if child == 0:
            save_until_killed(run, at)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        visible = published(run)
        whole = sum(is_whole(path) for path in visible.values())
        writers(run, PLAN, attempt="t2")
        named = {
            file.name
            for path in published(run).values()
            for file in Checkpoint.open(path).index.files
        }
        shards = {
            "/".join(path.parts[-2:]) for path in (run / "checkpoints").rglob("*.safetensors")
        }
        drafts = len(shards - named) + sum(1 for _ in (run / "checkpoints").rglob(".*"))
        print(at, killed, ",".join(str(step) for step in visible) or "-", whole, drafts, flush=True)
        at += stride
