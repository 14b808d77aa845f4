"""Connect to a Ray cluster, or start a local one for this run.

Ray reads RAY_AUTH_MODE when it is imported, so this module does not import it at its top.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from trainload.core.errors import ClusterError, first_line
from trainload.core.logs import log_handled
from trainload.launching.ranks.fork_server import ForkServer

_log = logging.getLogger(__name__)

_LISTEN_SECONDS = 5.0
_RESPONSE_SECONDS = 15.0
"""Time for the first response of a cluster that accepts connections."""
_CLOSE_SECONDS = 30.0
"""Time to wait for the end of a connection, which is the end of a local cluster."""
_GIVE_UP_SECONDS = 2.0
"""Time to wait for a connection to another cluster that has not been made: nothing has to end."""
_THREAD = "connection"
_LOOPBACK = "127.0.0.1"
_AUTH_MODE = "RAY_AUTH_MODE"
_NODE_INFO_METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


@dataclass(frozen=True, slots=True)
class Connection:
    """A driver's connection to a cluster.

    Attributes:
        is_temporary: True if the cluster ends with the connection.
        fork_server: socket of a fork server of this process's own; None if there is none.
    """

    is_temporary: bool
    fork_server: Path | None


@contextmanager
def connected(address: str | None, *, with_ranks: bool = True) -> Iterator[Connection]:
    """Connect to a cluster within the context, or use the connection that this process has.

    Args:
        address: HOST:PORT of a cluster, or "auto"; None starts a local cluster for the context. It
            listens on the loopback interface only, and requires its token, which Ray creates and
            stores in ~/.ray/auth_token.
        with_ranks: False if no ranks will run, so that a local cluster needs no fork server.

    Yields:
        The connection.

    Raises:
        ClusterError: the cluster is not reachable, or rejects this process's token; or the fork
            server of a local cluster cannot be started.
    """
    connecting = _begun_early.get()
    _begun_early.set(None)
    if connecting is None:
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            yield Connection(is_temporary=False, fork_server=None)
            return
        connecting = _Connecting(address, with_ranks)
    try:
        yield connecting.wait()
    finally:
        connecting.close()


@contextmanager
def connecting_early(address: str | None, *, with_ranks: bool = True) -> Iterator[None]:
    """Begin to connect now, for `connected(address)` within the context.

    Meanwhile the caller imports torch, and opens and checks the package. Errors are raised by
    `connected`. The arguments are those of `connected`.
    """
    connecting = _Connecting(address, with_ranks)
    token = _begun_early.set(connecting)
    try:
        yield
    finally:
        _begun_early.reset(token)
        connecting.close()


def abandon() -> bool:
    """Give up connections that are still being made or ended, although nobody waits for them, and
    remove their temporary folders.

    Returns:
        True if there is one. Then the exit handler of Ray would wait for it, perhaps forever: a
        KeyboardInterrupt in the main thread may have left Python's import lock locked.
    """
    if all(thread.name != _THREAD for thread in threading.enumerate()):
        return False
    for folder in list(_folders):
        folder.cleanup()
    return True


class _Connecting:
    """A connection that a thread makes, holds and ends.

    The processes of a local cluster would end with the thread that has started them. And only in
    the main thread does Ray replace the handler of SIGTERM.

    Args:
        address, with_ranks: see `connected`.
    """

    def __init__(self, address: str | None, with_ranks: bool) -> None:
        self._address = address
        self._needs_server = address is None and with_ranks
        self._made: Future[Connection] = Future()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._hold, name=_THREAD, daemon=True)
        self._thread.start()

    def wait(self) -> Connection:
        """Wait for the connection, and return it.

        Raises:
            ClusterError: as for `connected`.
        """
        return self._made.result()

    def close(self) -> None:
        """End the connection, with the local cluster. Only the first call waits for the end."""
        if not self._is_over.is_set():
            self._is_over.set()
            must_end = self._address is None or self._made.done()
            self._thread.join(_CLOSE_SECONDS if must_end else _GIVE_UP_SECONDS)

    def _hold(self) -> None:
        try:
            with _own_fork_server() if self._needs_server else nullcontext() as server:
                if self._is_over.is_set():
                    return
                ray = _connect(self._address)
                try:
                    self._made.set_result(Connection(self._address is None, server))
                    self._is_over.wait()
                finally:
                    ray.shutdown()
        except BaseException as error:  # noqa: BLE001  # raised by the waiting thread, or logged
            if self._made.done():
                log_handled(_log, "the connection to the cluster was not ended", error)
            else:
                self._made.set_exception(error)


_folders: list[tempfile.TemporaryDirectory[str]] = []
_begun_early: ContextVar[_Connecting | None] = ContextVar("connecting", default=None)


@contextmanager
def _own_fork_server() -> Iterator[Path]:
    """Run a fork server within the context. Yields the path of its socket."""
    with ExitStack() as stack:
        try:
            folder = tempfile.TemporaryDirectory(prefix="trainload-", ignore_cleanup_errors=True)
            _folders.append(folder)
            stack.callback(_folders.remove, folder)
            path = Path(stack.enter_context(folder)) / "forks.socket"
            stack.enter_context(ForkServer.connect(0.0, path))
        except OSError as error:
            raise ClusterError(
                "the process from which the ranks are forked cannot be started",
                where=f"among the temporary files, {tempfile.gettempdir()}",
                got=first_line(error),
                hint="Set TMPDIR to a folder that can be written.",
            ) from error
        yield path


def _connect(address: str | None) -> Any:
    """Return the module `ray` once it is connected."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    began = time.monotonic()
    try:
        if address is not None:
            check_listener(address)
            if asks_for_token(address) and not present_token():
                raise _imported_before_error(address)
        import ray
        from ray.exceptions import AuthenticationError

        logging.getLogger("ray").setLevel(logging.ERROR)

        own: dict[str, Any] = (
            {"include_dashboard": False, "_node_ip_address": _LOOPBACK} if address is None else {}
        )
        try:
            with _block_hangups():
                ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **own,
                )
        except AuthenticationError as error:
            raise token_error(address or "local", first_line(error)) from error
    except ClusterError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            "no Ray cluster responds",
            where=f"address {address or 'local'}",
            got=f"{first_line(error)}, after {time.monotonic() - began:.0f} s",
            hint="Start one with `ray start --head`, or omit --address to use a local one.",
        ) from error
    return ray


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


def token_error(address: str, got: str) -> ClusterError:
    """Return the error for a cluster that rejects this process's token, or its lack of one."""
    return ClusterError(
        "the cluster requires its token",
        where=f"address {address}",
        got=got,
        hint=(
            "Provide the cluster's token in RAY_AUTH_TOKEN, in the file at RAY_AUTH_TOKEN_PATH, or"
            " in ~/.ray/auth_token."
        ),
    )


def present_token() -> bool:
    """Make Ray present the user's token to clusters, unless RAY_AUTH_MODE is set.

    The token is in RAY_AUTH_TOKEN, in the file of RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token. Ray
    itself does so only for clusters that it discovers by itself.

    Returns:
        False if Ray was imported before, and does not read RAY_AUTH_MODE again.
    """
    if _AUTH_MODE in os.environ or not _has_token():
        return True
    if "ray" in sys.modules:
        return False
    os.environ[_AUTH_MODE] = "token"
    return True


def _imported_before_error(address: str) -> ClusterError:
    return ClusterError(
        "Ray was imported without the cluster's token",
        where=f"address {address}",
        expected=f"{_AUTH_MODE}=token, which Ray reads when it is imported",
        got=f"no {_AUTH_MODE}",
        hint=f'Set os.environ["{_AUTH_MODE}"] = "token" before `import ray`.',
    )


def _has_token() -> bool:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (
        bool(os.environ.get("RAY_AUTH_TOKEN"))
        or (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()
    )


def asks_for_token(address: str) -> bool:
    """Return True if the cluster at host:port rejects requests without a token.

    If the cluster has no token, the driver must not enable one either: it would reject the
    cluster's own requests, and its actors would die as soon as they are created.

    Raises:
        TimeoutError: the server accepts connections, but does not respond. Ray itself would retry
            for minutes.
    """
    with grpc.insecure_channel(address.removeprefix("ray://")) as channel:
        ask = channel.unary_unary(
            _NODE_INFO_METHOD, request_serializer=bytes, response_deserializer=bytes
        )
        try:
            ask(b"", timeout=_RESPONSE_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError("it accepts connections, but does not respond") from error
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
