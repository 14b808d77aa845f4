"""Call functions side by side in forked processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from trainload.core.errors import TrainloadError, raised
from trainload.core.processes import end_with_parent

T = TypeVar("T")


class ChildEnded(Exception):
    """A forked process has ended before its function did, for example for lack of memory.

    Attributes:
        name: name of the function.
        status: exit status of the process, negative for the number of a signal.
    """

    def __init__(self, name: str, status: int) -> None:
        how = (
            f"was killed by signal {-status} ({signal.Signals(-status).name})"
            if status < 0
            else f"ended with status {status}"
        )
        super().__init__(f"the process for {name} {how}")
        self.name, self.status = name, status


def side_by_side(
    functions: Mapping[str, Callable[[], T]], processes: int
) -> Iterator[tuple[str, T]]:
    """Call functions, and yield (name, result) as they end.

    Each is called in a process forked from this one, whose memory is freed with it. With one
    process they are called in this one, in order. Threads do not survive a fork, so more than one
    is for callers whose other threads hold no locks, and which have not used CUDA.

    Args:
        functions: name -> function. Its result is pickled.
        processes: number of processes at a time.

    Raises:
        Exception: that of a function. The other processes are ended.
        ChildEnded: a process was killed.
    """
    if processes == 1:
        for name, function in functions.items():
            yield name, function()
        return
    waiting = list(functions.items())
    running: dict[Connection, tuple[str, ForkProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                name, function = waiting.pop(0)
                connection, process = _start(function)
                running[connection] = name, process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                name, process = running.pop(ready)
                yield name, _result(name, ready, process)
    finally:
        for connection, (_, process) in running.items():
            _kill_group(process)
            process.join()
            connection.close()


@contextmanager
def alongside(name: str, function: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Call a function in a process forked from this one while the block runs.

    See `side_by_side` for who may fork.

    Args:
        name: name of the function, for messages.
        function: its result is pickled.

    Yields:
        A function that waits for the result and returns it, to be called once. It raises the
        function's exception, or ChildEnded if the process was killed. If it is not called, the
        process is ended with the block.
    """
    connection, process = _start(function)
    try:
        yield lambda: _result(name, connection, process)
    finally:
        if process.is_alive():
            _kill_group(process)
        process.join()
        connection.close()


def _start(function: Callable[[], Any]) -> tuple[Connection, ForkProcess]:
    """Fork a process that calls a function. Returns it with the connection for the outcome."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, theirs))
    process.start()
    theirs.close()
    return ours, process


def _kill_group(process: ForkProcess) -> None:
    """Kill a process and those that it has started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its group yet
        process.kill()


def _call(function: Callable[[], Any], connection: Connection) -> None:
    """Call a function, and send (None, its result) or (its exception, None)."""
    end_with_parent()
    os.setpgid(0, 0)
    try:
        outcome: tuple[Exception | None, Any] = (None, function())
    except Exception as error:  # noqa: BLE001  # raised again in the parent
        if not isinstance(error, TrainloadError):
            traceback.print_exc()  # the parent does not have it
        outcome = (_picklable(error), None)
    connection.send_bytes(pickle.dumps(outcome))


def _picklable(error: Exception) -> Exception:
    """Return an exception that can be sent: itself, or one with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # an exception may hold anything
        return RuntimeError(raised(error))
    return error


def _result(name: str, connection: Connection, process: ForkProcess) -> Any:
    """Return the result of a function, or raise its exception."""
    with connection:
        try:
            data = connection.recv_bytes()
        except EOFError:
            data = None
    process.join()
    if data is None:
        raise ChildEnded(name, process.exitcode or 0)
    error, result = pickle.loads(data)
    if error is not None:
        raise error
    return result
