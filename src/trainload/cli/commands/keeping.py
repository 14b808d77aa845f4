"""Supervision of a run's driver: a separate process, which is restarted if it or its connection to
the cluster is lost.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from trainload.cli.commands.shared import DONE, FAILED, WRONG, err
from trainload.core.errors import LostClusterError, RunInterrupted, TrainingError
from trainload.core.logs import logged_suppress
from trainload.core.processes import end_with_parent, interrupt, unignored_handlers
from trainload.launching.run.run_directory import RUN_FILE, resume_command
from trainload.launching.run.run_place import place_name
from trainload.launching.settings.run_settings import RunSettings

if TYPE_CHECKING:
    from trainload.launching.run.run_state import RunState

_log = logging.getLogger(__name__)

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
    signal.signal(signal.SIGTERM, interrupt)
    end_with_parent(signal.SIGTERM)


def keep(
    first: Sequence[str],
    again: Sequence[str],
    run_dir: Path,
    answers: Callable[[], bool],
    *,
    as_json: bool = False,
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
        as_json: print what the last driver has printed, and nothing of those that were lost.

    Returns:
        The exit status of the last driver.

    Raises:
        RunInterrupted: the driver was ended through this process before it could report.
        TrainingError: the driver ended before it had created the run, or was lost too often.
        LostClusterError: the cluster did not respond for the run's `node_patience`.
    """
    if not as_json:
        return _keep(first, again, run_dir, answers, None)
    with os.fdopen(os.memfd_create("output of the driver"), "w+b") as output:
        status = _keep(first, again, run_dir, answers, output)
        output.seek(0)
        printed = output.read().decode()
    if not printed:
        raise TrainingError(
            "the run's driver ended without a result", where=place_name(run_dir), got=_how(status)
        )
    sys.stdout.write(printed)
    return status


def _keep(
    first: Sequence[str],
    again: Sequence[str],
    run_dir: Path,
    answers: Callable[[], bool],
    output: BinaryIO | None,
) -> int:
    from trainload.launching.run.run_state import read_state

    losses, saved = 0, None
    signals: set[int] = set()
    arguments = first
    has_run = _may_have_run(run_dir)
    while True:
        before = read_state(run_dir)
        status = _drive(arguments, run_dir, signals, output)
        arguments = again
        state = read_state(run_dir)
        has_reported = state is not None and state != before
        has_run = has_run or state is not None or _may_have_run(run_dir)
        if status == DONE:
            return status
        if signals and status < 0:
            hint = f"Continue with: {resume_command(run_dir)}" if has_run else "Launch it again."
            raise RunInterrupted(
                "the run's driver was ended as requested, by "
                + " and ".join(signal.Signals(number).name for number in sorted(signals)),
                where=place_name(run_dir),
                hint=hint,
            )
        if state is None and status in (FAILED, WRONG) and not losses:
            return status
        if not has_run:
            raise TrainingError(
                "the run's driver ended before it had created the run",
                where=place_name(run_dir),
                got=_how(status),
            )
        if signals or not (
            _is_lost(state, status) if has_reported else losses or status not in (FAILED, WRONG)
        ):
            return status
        checkpoint = None if state is None else state.summary.checkpoint
        losses = losses + 1 if losses and checkpoint == saved else 1
        saved = checkpoint
        if losses > _MOST_LOSSES:
            raise TrainingError(
                "the run's driver was lost again",
                where=place_name(run_dir),
                expected=f"at most {_MOST_LOSSES} losses in a row without a new checkpoint",
                got=f"one more, {_how(status)}",
                hint=f"Continue from the last checkpoint with: {resume_command(run_dir)}",
            )
        err().print(
            f"the run's driver was lost ({_how(status)}): starting a new one",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        _wait_for_cluster(answers, run_dir)


def _may_have_run(run_dir: Path) -> bool:
    """Return False if there is certainly no run in a folder."""
    try:
        os.stat(run_dir / RUN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _wait_for_cluster(answers: Callable[[], bool], run_dir: Path) -> None:
    """Wait until the cluster responds.

    Raises:
        LostClusterError: it does not for too long.
    """
    seconds = _patience(run_dir)
    until = time.monotonic() + seconds
    while not answers():
        if time.monotonic() > until:
            raise LostClusterError(
                "the cluster does not respond",
                where=place_name(run_dir),
                expected=f"a response within {seconds:g} s",
                got="none",
                hint=f"When it responds again, continue with: {resume_command(run_dir)}",
            )
        time.sleep(_PAUSE_SECONDS)


def _patience(run_dir: Path) -> float:
    """Return a run's `node_patience` in seconds.

    The run is not opened for it, which would import torch; while it cannot be read, the default
    counts.
    """
    default: float = RunSettings.model_fields["node_patience"].default
    with logged_suppress(
        _log, f"{run_dir / RUN_FILE} cannot be read", OSError, ValueError, AttributeError, TypeError
    ):
        return float(json.loads((run_dir / RUN_FILE).read_bytes()).get("node_patience", default))
    return default


def _how(status: int) -> str:
    """Return how a process has ended, for people."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _is_lost(state: RunState | None, status: int) -> bool:
    """Return True if a driver was lost, judged by its last state and its exit status."""
    if state is None or not state.over or state.summary.error == LostClusterError.__name__:
        return True
    return state.phase == "ended" and status not in (FAILED, WRONG)


def _drive(
    arguments: Sequence[str], run_dir: Path, signals: set[int], output: BinaryIO | None
) -> int:
    """Run one driver and forward signals to it, which are added to `signals`.

    Args:
        arguments: its arguments.
        run_dir: the run's folder.
        signals: numbers of the signals that were forwarded.
        output: file whose contents are replaced by what it prints; None for this process's output.
    """
    if output is not None:
        output.seek(0)
        output.truncate()
    driver = subprocess.Popen(
        [sys.executable, "-m", "trainload", *arguments],
        env={**os.environ, KEPT: str(run_dir)},
        stdout=output,
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
