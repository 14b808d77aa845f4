"""Keeps the driver of a run going: it is a process of its own, which is started again where it, or
its way to the cluster, is lost.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainload.cli.commands.shared import DONE, FAILED, WRONG, err
from trainload.core.errors import LostClusterError
from trainload.core.processes import unignored_handlers

if TYPE_CHECKING:
    from trainload.launching.run.run_state import RunState

KEPT = "TRAINLOAD_KEPT"
"""Set in the environment of a driver that is kept."""
_DEATH_OF_PARENT = 1
_PAUSE_SECONDS = 2.0
_MOST_LOSSES = 3


def is_kept() -> bool:
    """Return True if this process is a driver that a supervisor restarts."""
    return KEPT in os.environ


def stop_with_parent() -> None:
    """In a driver that is kept: SIGTERM asks the run to stop, as Ctrl-C does, from now on; and so
    does the death of the keeper.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGTERM)


def keep(
    arguments: Sequence[str], run_dir: Path, answers: Callable[[], bool], patience: float
) -> int:
    """Runs `trainload ARGUMENTS`, which drives a run, to its end.

    A driver is lost that ends without having said how, since it was killed, or because the
    cluster's head is gone; or that was killed after the last step, before the run's result was
    written. Then this waits until the cluster answers, and starts another one; until three in a row
    were lost without a new checkpoint. What a state says that another driver has left is not taken
    for the word of this one. A driver that was asked to end, through this process, has no
    successor.

    Args:
        arguments: of the driver.
        run_dir: the run's folder.
        answers: whether the cluster does.
        patience: seconds that it may take to.

    Returns:
        The driver's exit status.
    """
    from trainload.launching.run.run_state import read_state

    losses, saved = 0, None
    signals: set[int] = set()
    while True:
        before = read_state(run_dir)
        status = _drive(arguments, signals)
        state = read_state(run_dir)
        has_reported = state is not None and state != before
        if state is None and status not in (DONE, FAILED, WRONG):
            err().print(
                f"trainload: the driver of {run_dir} died before it started the run, with status"
                f" {status}",
                soft_wrap=True,
                highlight=False,
            )
            return FAILED
        if state is None or status == DONE:
            return status
        if signals and status < 0:
            err().print(
                f"the run's driver was ended by signal {-status}, as requested",
                highlight=False,
                soft_wrap=True,
            )
            return FAILED
        if signals or not (
            _is_lost(state, status) if has_reported else losses or status not in (FAILED, WRONG)
        ):
            return status
        losses = 1 if state.summary.checkpoint != saved else losses + 1
        saved = state.summary.checkpoint
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        if losses > _MOST_LOSSES:
            err().print(
                f"the run's driver was lost again ({how}): giving up",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            return FAILED
        err().print(
            f"the run's driver was lost ({how}): starting a new one",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        until = time.monotonic() + patience
        while not answers():
            if time.monotonic() > until:
                err().print(
                    f"the cluster has not responded for {patience:g} s: giving up",
                    highlight=False,
                    soft_wrap=True,
                )
                return FAILED
            time.sleep(_PAUSE_SECONDS)


def _is_lost(state: RunState, status: int) -> bool:
    """Return True if a driver was lost, by its last state and its exit status."""
    if not state.over or state.summary.error == LostClusterError.__name__:
        return True
    return state.phase == "ended" and status not in (FAILED, WRONG)


def _drive(arguments: Sequence[str], signals: set[int]) -> int:
    """Runs one driver, and passes signals on to it, which are added to `signals`."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "trainload", *arguments],
        env={**os.environ, KEPT: "1"},
        start_new_session=True,
    )

    def forward(number: int, frame: object) -> None:
        signals.add(number)
        driver.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    before = unignored_handlers(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in before:
        signal.signal(number, forward)
    try:
        return driver.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
