"""A process from which the ranks of a node are forked, with Python, torch and trainload imported.

A forked rank starts within milliseconds, and shares the memory of the imported code. The server
itself has one thread, no process group and no CUDA context, which would not survive a fork. Runs of
one user with one environment share a server, which ends when it has had no client for a time. The
processes of a client end with the client.

    with ForkServer.connect(idle_seconds=300.0) as server:
        child = server.fork("rank 3", {"CUDA_VISIBLE_DEVICES": "0"})
        child.connection.send(task)
        child.exit_status()
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import filelock

from trainload.core.errors import TrainingError
from trainload.core.processes import end_with_parent, name_process
from trainload.launching.ranks.server_socket import check_peer, short_path, socket_path

_COMMAND = (
    "import sys; from trainload.launching.ranks.fork_server import serve;"
    " serve(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))"
)
_LENGTH_BYTES = 4
_NAME = "trainload forks"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The fork server of a node, which is started if there is none.

    Attributes:
        idle_seconds: time without clients after which a server that is started ends.
        path: its socket; None for the one of this user and environment.
    """

    idle_seconds: float
    path: Path | None = None

    def connect(self) -> ForkServer:
        """Connect to the server; the errors are those of `ForkServer.connect`."""
        return ForkServer.connect(self.idle_seconds, self.path)


@dataclass(frozen=True, slots=True)
class _Request:
    """A process to fork."""

    name: str
    folder: str
    environment: dict[str, str]


class Child:
    """A forked process.

    Attributes:
        pid: its process id.
        connection: connection to its `rank_process.main`.
    """

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection
        self._ended = threading.Event()
        self._status = 0

    def set_status(self, status: int) -> None:
        """Record the exit status of the process, which has ended."""
        self._status = status
        self._ended.set()

    def exit_status(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the process.

        Returns:
            Its exit status, negative for the number of a signal; None if it has not ended in time.
        """
        return self._status if self._ended.wait(timeout) else None

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """Client of a fork server. Use `connect`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._replies: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}
        self._children_lock = threading.Lock()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, name="fork server", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, idle_seconds: float, path: Path | None = None) -> ForkServer:
        """Connect to a server, and start it if there is none.

        Args:
            idle_seconds: time without clients after which a server that is started here ends.
            path: its socket. Default: the one of this user and environment.

        Raises:
            OSError: the folder of its socket cannot be used, or belongs to another user.
        """
        path = path or socket_path()
        with filelock.FileLock(path.with_suffix(".lock")):
            connection = _connection(path)
            if connection is None:
                _start(path, idle_seconds)
                connection = _connection(path)
        if connection is None:
            raise ConnectionError(f"{path}: the server did not start")
        return cls(connection)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, name: str, environment: Mapping[str, str]) -> Child:
        """Fork a process that runs `rank_process.main`, with the working directory, the output and
        the environment of this process.

        The first call may wait until the server has imported its modules.

        Args:
            name: name of the process, as `ps -o comm` and `top` show it; at most 15 bytes.
            environment: changes of its environment.

        Raises:
            TrainingError: the server has ended.
        """
        request = _Request(name, os.getcwd(), {**os.environ, **environment})
        data = json.dumps(asdict(request)).encode()
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                socket.send_fds(
                    self._socket, [len(data).to_bytes(_LENGTH_BYTES)], [theirs.fileno(), 1, 2]
                )
                self._socket.sendall(data)
                pid = self._replies.get()
            except OSError:
                pid = None
        if pid is None or pid < 0:
            ours.close()
            raise TrainingError(
                "the process from which ranks are forked has ended"
                if pid is None
                else "no process can be forked: the user's limit of processes is reached"
            )
        child = Child(pid, Connection(ours.detach()))
        with self._children_lock:
            if pid in self._early:
                child.set_status(self._early.pop(pid))
            elif self._has_ended:
                child.set_status(-signal.SIGKILL)
            else:
                self._children[pid] = child
        return child

    def close(self) -> None:
        """Disconnect. The processes that were forked here end."""
        with contextlib.suppress(OSError):  # the server has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                if "status" in message:
                    self._set_status(message["pid"], message["status"])
                else:
                    self._replies.put(message["pid"])
        self._replies.put(None)
        with self._children_lock:
            self._has_ended = True
            for child in self._children.values():  # the server ends them with the connection
                child.set_status(-signal.SIGKILL)
            self._children.clear()

    def _set_status(self, pid: int, status: int) -> None:
        with self._children_lock:
            if pid in self._children:
                self._children.pop(pid).set_status(status)
            else:  # it ended before `fork` has returned
                self._early[pid] = status


def _connection(path: Path) -> socket.socket | None:
    """Return a connection to the server; None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with short_path(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        return None
    check_peer(connection)
    return connection


def _start(path: Path, idle_seconds: float) -> None:
    """Start a server. It can be connected to at once, and answers once its modules are imported."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, short_path(path) as address:
        listener.bind(address)
        listener.listen()
        # operator libraries are imported as in the driver, whose sys.path Ray passes on
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        }
        server = [sys.executable, "-c", _COMMAND, str(listener.fileno()), str(path)]
        # no child of this process, since Ray ends the children of an actor that ends
        subprocess.run(
            ["/bin/sh", "-c", '"$0" "$@" &', *server, str(idle_seconds)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=2,  # this process's output may be its result
            pass_fds=[listener.fileno()],
            start_new_session=True,
            check=True,
        )


# In the server


class _Client:
    """Connection of a client, and its processes: pidfd -> pid."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.children: dict[int, int] = {}

    def report(self, message: Mapping[str, int]) -> None:
        """Send a message, unless the client has ended."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class _Server:
    def __init__(self, listener: socket.socket, path: Path, idle_seconds: float) -> None:
        self._listener = listener
        self._path = path
        self._idle_seconds = idle_seconds
        self._clients: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until there has been no client for a time."""
        while True:
            events = self._selector.select(None if self._clients else self._idle_seconds)
            if not events and not self._clients:
                self._path.unlink(missing_ok=True)
                return
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Client):
                    if key.fileobj is key.data.connection:
                        self._answer(key.data)
                    else:
                        self._end(key.data, key.fd)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            check_peer(connection)
        except OSError:  # another user, or too many connections
            return
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _answer(self, client: _Client) -> None:
        """Fork a process, or end those of a client that is gone."""
        request = _read_request(client.connection)
        if request is None:
            self._leave(client)
            return
        data, descriptors = request
        try:
            pid = os.fork()
        except OSError:  # too many processes
            pid = -1
        if pid == 0:
            self._close_in_child()
            _run_rank(descriptors, _Request(**json.loads(data)))
        for descriptor in descriptors:
            os.close(descriptor)
        if pid == -1:
            client.report({"pid": -1})
            return
        descriptor = os.pidfd_open(pid)
        client.children[descriptor] = pid
        self._selector.register(descriptor, selectors.EVENT_READ, client)
        client.report({"pid": pid})

    def _end(self, client: _Client, descriptor: int) -> None:
        """Report a process that has ended."""
        self._selector.unregister(descriptor)
        os.close(descriptor)
        pid = client.children.pop(descriptor)
        _, status = os.waitpid(pid, 0)
        client.report({"pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _leave(self, client: _Client) -> None:
        for pid in client.children.values():
            os.kill(pid, signal.SIGKILL)
        self._selector.unregister(client.connection)
        del self._clients[client.connection.fileno()]
        client.connection.close()

    def _close_in_child(self) -> None:
        self._selector.close()
        os.close(self._listener.detach())
        for client in self._clients.values():
            os.close(client.connection.detach())
            for descriptor in client.children:
                os.close(descriptor)


def serve(descriptor: int, path: str, idle_seconds: float) -> None:
    """Serve clients that connect to a listening socket, until there have been none for a time."""
    name_process(_NAME)
    # everything that a rank imports: none of it starts a thread that a rank would miss
    import trainload.launching.ranks.rank_process  # noqa: F401
    from trainload.autograd_trace.compiling.inductor import import_loader

    import_loader()

    with socket.socket(fileno=descriptor) as listener:
        _Server(listener, Path(path), idle_seconds).run()


def _read_request(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """Read a request and its descriptors; None if the client is gone."""
    descriptors: list[int] = []
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 3)
        if len(header) == _LENGTH_BYTES and len(descriptors) == 3:
            length = int.from_bytes(header)
            data = connection.recv(length, socket.MSG_WAITALL)
            if len(data) == length:
                return data, descriptors
    except OSError:
        pass
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _run_rank(descriptors: list[int], request: _Request) -> None:
    """Run a rank in a forked process, which never returns from here."""
    from trainload.launching.ranks.rank_process import main

    status = 1
    try:
        end_with_parent()
        connection, output, errors = descriptors
        for source, target in ((output, 1), (errors, 2)):
            os.dup2(source, target)
            os.close(source)
        name_process(request.name)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        tempfile.tempdir = None  # so that TMPDIR of this environment counts
        status = main(Connection(connection))
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # the interpreter's exit handlers are those of the server
