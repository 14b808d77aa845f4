"""Connect to a Ray cluster, or start a local one for this run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import ray
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray.exceptions import AuthenticationError

from trainload.core.errors import ClusterError, first_line

_LISTEN_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"
_NODE_INFO_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


def connect(address: str | None) -> bool:
    """Connect to a cluster, or start a local one.

    A local cluster listens on the loopback interface only, and requires its token, which Ray
    creates and stores in ~/.ray/auth_token.

    Returns:
        True if this process made the connection, and must shut Ray down; False if it was connected
        already.

    Raises:
        ClusterError: the cluster is not reachable, or rejects this process's token.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    # Workers keep the working directory of the driver, so that an import or a path means the same
    # there.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    # Ray Train waits until the deadline; the supervisor moves earlier
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    began = time.monotonic()
    try:
        if address is not None:
            check_listener(address)
            if asks_for_token(address):
                show_token()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own: dict[str, Any] = (
                {"include_dashboard": False, "_node_ip_address": _LOOPBACK}
                if address is None
                else {}
            )
            with _block_hangups():
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **own,
                )
    except AuthenticationError as error:
        raise turned_away(address or "local", error) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "no Ray cluster responds",
            where=f"address {address or 'local'}",
            got=f"{first_line(error)}, after {time.monotonic() - began:.0f} s",
            hint="Start one with `ray start --head`, or omit --address to use a local one.",
        ) from error
    return True


@contextmanager
def _block_hangups() -> Iterator[None]:
    """Block SIGHUP in processes that are started within the context.

    Otherwise a closed terminal would end the cluster before the run has written its checkpoint.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def turned_away(address: str, error: AuthenticationError) -> ClusterError:
    """Return the error for a cluster that rejects this process's token, or its lack of one."""
    return ClusterError(
        "the cluster requires its token",
        where=f"address {address}",
        got=first_line(error),
        hint=(
            "Provide the cluster's token in RAY_AUTH_TOKEN, in the file at RAY_AUTH_TOKEN_PATH, or"
            " in ~/.ray/auth_token."
        ),
    )


def show_token() -> None:
    """Enable token authentication if the user has a token, unless RAY_AUTH_MODE is set otherwise.

    The token is in RAY_AUTH_TOKEN, in the file of RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token. Ray
    itself does so only for clusters that it discovers by itself.
    """
    # it logs a line at each call
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def asks_for_token(address: str) -> bool:
    """Return True if the cluster at host:port rejects requests without a token.

    If the cluster has no token, the driver must not enable one either: it would reject the
    cluster's own requests, and its actors would die as soon as they are created.
    """
    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        ask = channel.unary_unary(
            _NODE_INFO_METHOD, request_serializer=bytes, response_deserializer=bytes
        )
        try:
            ask(b"", timeout=_LISTEN_SECONDS)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def check_listener(address: str) -> None:
    """Raise OSError or ValueError if no server listens at host:port.

    Ray itself would retry for minutes.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), _LISTEN_SECONDS).close()


def answers(address: str) -> bool:
    """Return True if a server listens at an address."""
    try:
        check_listener(address)
    except (OSError, ValueError):
        return False
    return True
