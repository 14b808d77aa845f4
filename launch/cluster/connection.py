"""The way to a Ray cluster, or a local one for this run."""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings

import ray

from trainload.capture.errors import ClusterError

_LISTEN_SECONDS = 5.0


def connect(address: str | None) -> bool:
    """Connects to a cluster, or starts a local one. Returns: whether this process started it.

    Raises: ClusterError if the address does not answer.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers keep the working directory of the driver, so that an import or a path means the same there.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # Ray Train waits out the time that is left; the supervisor uses it
    began = time.monotonic()
    try:
        if address is not None:
            demand_listener(address)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=address or "local", include_dashboard=None if address else False, log_to_driver=False, logging_level=logging.ERROR
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "no Ray cluster answers",
            where=f"address {address or 'local'}",
            got=f"{str(error).splitlines()[0]}, after {time.monotonic() - began:.0f} s",
            cure="Start one with `ray start --head`, or leave out --address for a local one.",
        ) from error
    return True


def demand_listener(address: str) -> None:
    """Demands that somebody listens at host:port, since Ray would try for minutes. Raises: OSError, ValueError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), _LISTEN_SECONDS).close()


def answers(address: str) -> bool:
    """Whether somebody listens at an address."""
    try:
        demand_listener(address)
    except (OSError, ValueError):
        return False
    return True
