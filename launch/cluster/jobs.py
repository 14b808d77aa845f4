"""Detached runs: their driver is a job of the Ray cluster, so they do not depend on the process
that launched them.
"""

from __future__ import annotations

import itertools
import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainload.core.errors import (
    ClusterError,
    LostClusterError,
    StorageError,
    TrainingError,
    first_line,
)
from trainload.core.logs import logged_suppress
from trainload.launching.cluster.connection import check_listener, present_token, token_error
from trainload.launching.run.run_place import place_name
from trainload.launching.run.working_copy import state_at

_log = logging.getLogger(__name__)

_BEGIN_SECONDS = 120.0
_LOOK_SECONDS = 0.5


def submit(address: str, run_dir: Path, arguments: Sequence[str]) -> str:
    """Submit a run's driver as a job of a cluster, and wait for a limited time until it has
    started.

    Args:
        address: address of the cluster's dashboard, http://HOST:8265.
        run_dir: the run's folder, which must have the same path on the cluster's head node, or a
            working copy.
        arguments: command-line arguments of `trainload` in the job.

    Returns:
        The job's id: "trainload-" and the name of the run's folder, with a number if a finished job
        has that id. The job may still be pending.

    Raises:
        ClusterError: the cluster is not reachable or rejects the job; no job was created.
        LostClusterError: the connection failed, and it is unknown whether the job was created.
        TrainingError: the job ended before the driver started; the error has its last output line.
    """
    client = _client(address)
    before = state_at(run_dir)
    name = f"trainload-{run_dir.name}"
    try:
        name = _unused_name(client, name)
        client.submit_job(
            entrypoint=shlex.join(["python", "-m", "trainload", *arguments]), submission_id=name
        )
    except RuntimeError as error:
        is_taken = "already exists" in str(error)
        raise ClusterError(
            (
                "the cluster already has a job with this name"
                if is_taken
                else "the cluster did not accept the job"
            ),
            where=f"{address}, job {name}",
            got="" if is_taken else first_line(error),
            hint=(
                "Choose another --run-dir: the job is named after its last part."
                if is_taken
                else ""
            ),
        ) from error
    except OSError as error:
        raise LostClusterError(
            "the cluster did not confirm whether it accepted the job",
            where=f"{address}, job {name}",
            got=first_line(error),
            hint=(
                "Look for it among the cluster's jobs, or run `trainload status"
                f" {shlex.quote(place_name(run_dir))}`."
            ),
        ) from error
    until = time.monotonic() + _BEGIN_SECONDS

    def has_begun() -> bool | None:
        with logged_suppress(_log, f"the state of {run_dir} cannot be read", StorageError):
            return state_at(run_dir) != before
        return None  # the job exists, whatever happens to the storage

    while time.monotonic() < until and not has_begun():
        last = _last_output_line(client, name)
        if last is not None and has_begun() is False:
            raise TrainingError(
                "the driver ended before it started the run",
                where=f"{address}, job {name}",
                got=last,
            )
        time.sleep(_LOOK_SECONDS)
    return name


def _unused_name(client: Any, name: str) -> str:
    """Return the name, with a number appended if finished jobs have it already."""
    over = {
        job.submission_id
        for job in client.list_jobs()
        if job.submission_id is not None and job.status.is_terminal()
    }
    numbers = itertools.count(2)
    unused = name
    while unused in over:
        unused = f"{name}-{next(numbers)}"
    return unused


def _last_output_line(client: Any, name: str) -> str | None:
    """Return the last output line of a finished job; None if it is not finished, or the cluster
    does not respond.
    """
    try:
        if not client.get_job_status(name).is_terminal():
            return None
        lines = [line for line in client.get_job_logs(name).splitlines() if line.strip()]
    except (OSError, RuntimeError):
        return None
    return lines[-1] if lines else "no output"


def _client(address: str) -> Any:
    began = time.monotonic()
    try:
        present_token()
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        check_listener(address.partition("://")[2] or address)
        try:
            return JobSubmissionClient(address)
        except AuthenticationError as error:
            raise token_error(address, first_line(error)) from error
    except ClusterError:
        raise
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "no Ray cluster accepts jobs at this address",
            where=f"address {address}",
            got=f"{first_line(error)}, after {time.monotonic() - began:.0f} s",
            hint=(
                "Pass the address of its dashboard, http://HOST:8265; `ray start --head` prints it."
            ),
        ) from error
