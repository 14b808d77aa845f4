"""Supervision of a run's driver: a separate process, which is restarted if it or its connection to
the cluster is lost.
"""

from __future__ import annotations

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
from trainload.core.processes import end_with_parent, unignored_handlers

if TYPE_CHECKING:
    from trainload.launching.run.run_state import RunState

KEPT = "TRAINLOAD_KEPT"
"""Environment variable of a supervised driver: the folder of its run."""
_PAUSE_SECONDS = 2.0
_MOST_LOSSES = 3


def kept_run() -> Path | None:
    """Return the folder of the run that this process drives for a supervisor; None if it has no
    supervisor.

    Only the first call does, so that programs that this process starts have none.
    """
    run_dir = os.environ.pop(KEPT, None)
    return None if run_dir is None else Path(run_dir)


def stop_with_parent() -> None:
    """Make SIGTERM, and the death of the supervisor, stop the run of this supervised driver."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_parent(signal.SIGTERM)


def keep(
    first: Sequence[str],
    again: Sequence[str],
    run_dir: Path,
    answers: Callable[[], bool],
    patience: Callable[[], float],
) -> int:
    """Drive a run with `trainload` commands until the run has ended.

    A driver is lost if it ends without a final state, because it was killed or the cluster's head
    is gone, or if it was killed after the last step, before it wrote the run's result. Then this
    function waits until the cluster responds and starts another driver, until three drivers in a
    row were lost without a new checkpoint. A state that an earlier driver wrote is ignored. A
    driver that was stopped through this process is not replaced.

    Args:
        first: arguments of the first driver.
        again: arguments of a driver that replaces a lost one.
        run_dir: the run's folder.
        answers: returns True if the cluster responds.
        patience: returns the time to wait for the cluster, in seconds.

    Returns:
        The driver's exit status.
    """
    from trainload.launching.run.run_state import read_state

    losses, saved = 0, None
    signals: set[int] = set()
    arguments = first
    while True:
        before = read_state(run_dir)
        status = _drive(arguments, run_dir, signals)
        arguments = again
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
        seconds = patience()
        until = time.monotonic() + seconds
        while not answers():
            if time.monotonic() > until:
                err().print(
                    f"the cluster has not responded for {seconds:g} s: giving up",
                    highlight=False,
                    soft_wrap=True,
                )
                return FAILED
            time.sleep(_PAUSE_SECONDS)


def _is_lost(state: RunState, status: int) -> bool:
    """Return True if a driver was lost, judged by its last state and its exit status."""
    if not state.over or state.summary.error == LostClusterError.__name__:
        return True
    return state.phase == "ended" and status not in (FAILED, WRONG)


def _drive(arguments: Sequence[str], run_dir: Path, signals: set[int]) -> int:
    """Run one driver and forward signals to it, which are appended to `signals`."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "trainload", *arguments],
        env={**os.environ, KEPT: str(run_dir)},
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
