"""Commands that a manifest runs on the head's pod: manifest drive, manifest evict."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainload.cli.commands import watching
from trainload.cli.commands.execution import run_group
from trainload.cli.commands.shared import DONE, FAILED, err, run_argument
from trainload.core.errors import DivergedError, RunInterrupted, StorageError
from trainload.launching.run.run_place import place_name, record_files

if TYPE_CHECKING:
    from trainload.launching.run.run_state import RunState

_PUBLISH_SECONDS = 30.0
_LOOK_SECONDS = 1.0
_EVICTED = "evicted"
"""A file in a run's folder: the run was stopped because its head pod is removed, not by a user."""


@click.command(hidden=True)
@click.option("--torchrun", is_flag=True, help="Run under torchrun, on each node.")
@run_argument
@click.argument("launched", metavar="-- LAUNCH", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def drive(context: click.Context, torchrun: bool, run_dir: Path, launched: tuple[str, ...]) -> int:
    """Launch a run with the options LAUNCH, or resume it if it already exists. For the entrypoint
    of a job.

    The exit status is 0 if another cluster would not help: the run has ended or was stopped. A run
    that has diverged fails and is not retried.
    """
    from trainload.launching.run.working_copy import has_run, state_at

    _check_converging(state_at(run_dir), run_dir)
    if torchrun:
        # all nodes decide before any rank has begun, since torchrun waits for all nodes
        resume = ["resume", place_name(run_dir), "--backend", "torchrun"]
        return _drive_under_torchrun(run_dir, resume if has_run(run_dir) else launched)
    files, began = record_files(run_dir), time.time()
    files.delete(_EVICTED)  # left by a head that ended before its driver did
    resume = ["resume", place_name(run_dir), "--address", "auto"]
    status = run_group(context.find_root().command, resume if has_run(run_dir) else launched)
    state = state_at(run_dir)
    if (
        status != FAILED
        or files.size(_EVICTED) is not None
        or state is None
        or state.time < began
        or not _was_stopped(state)
    ):
        files.delete(_EVICTED)
        return status
    _say_stopped()
    return DONE


@click.command(hidden=True)
@run_argument
@click.pass_context
def evict(context: click.Context, run_dir: Path) -> None:
    """Stop a run whose head pod will be removed, so that it continues elsewhere.

    For the preStop hook of that pod.
    """
    from trainload.launching.run.working_copy import state_at

    state = state_at(run_dir)
    if state is not None and state.alive:
        # otherwise the request to stop cannot be written either, which raises
        with suppress(StorageError):
            record_files(run_dir).replace(_EVICTED, b"")
    context.invoke(watching.stop, run_dir=run_dir)


def _drive_under_torchrun(run_dir: Path, arguments: Sequence[str]) -> int:
    """Run a command on all ranks of this node; torchrun finds the others through PET_* variables.

    The exit status is 0 if the run was stopped on request. If this pod alone is terminated, all
    pods have to start again.
    """
    began = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "-m", "trainload", *arguments]
    is_terminated = threading.Event()
    with subprocess.Popen(command) as child:

        def forward(number: int, frame: object) -> None:
            is_terminated.set()
            child.send_signal(signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, forward)
        try:
            status = child.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    if status == DONE or is_terminated.is_set() or not _ends_stopped(run_dir, began):
        return DONE if status == DONE else FAILED
    _say_stopped()
    return DONE


def _ends_stopped(run_dir: Path, began: float) -> bool:
    """Return True if a run that ends was stopped on request.

    Rank 0, perhaps on another node, may still have to publish its state.
    """
    from trainload.launching.run.working_copy import state_at

    deadline = time.monotonic() + _PUBLISH_SECONDS
    while True:
        state = state_at(run_dir)
        if state is not None and state.over and state.time >= began:
            return _was_stopped(state)
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)


def _say_stopped() -> None:
    err().print(
        "the run was stopped, so the job is done: submit it again to continue", highlight=False
    )


def _was_stopped(state: RunState) -> bool:
    """Return True if a run was stopped on request, with a checkpoint."""
    return state.over and state.summary.error == RunInterrupted.__name__


def _check_converging(state: RunState | None, run_dir: Path) -> None:
    """Check that a run did not diverge: resumed from its last checkpoint, it would do so again."""
    if state is not None and state.over and state.summary.error == DivergedError.__name__:
        raise DivergedError(
            "the run has diverged, and would diverge again",
            where=place_name(run_dir),
            got=state.summary.message,
            hint=(
                "Continue with other settings (trainload resume --set), or launch a run in another"
                " folder."
            ),
        )
