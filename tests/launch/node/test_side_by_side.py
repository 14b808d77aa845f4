"""Functions are called side by side in forked processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from trainload.core.processes import has_ended, this_process
from trainload.launching.node.side_by_side import ChildEnded, alongside, side_by_side


class UnsendableError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail(error: Exception) -> int:
    raise error


def runs(pid: int) -> bool:
    """Return True if a process has neither ended nor been killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_every_result_has_its_name(processes: int) -> None:
    functions = {str(n): partial(pow, n, 2) for n in range(5)}
    assert dict(side_by_side(functions, processes)) == {str(n): n**2 for n in range(5)}


def test_no_function_is_nothing() -> None:
    assert not dict(side_by_side({}, 2))


@pytest.mark.parametrize(("processes", "expected"), [(1, True), (2, False)])
def test_one_process_is_this_one(processes: int, expected: bool) -> None:
    results = dict(side_by_side({"a": os.getpid, "b": os.getpid}, processes))
    assert {pid == os.getpid() for pid in results.values()} == {expected}


def test_functions_run_at_the_same_time() -> None:
    barrier = get_context("fork").Barrier(2)
    meet = partial(barrier.wait, 60)
    assert sorted(dict(side_by_side({"a": meet, "b": meet}, 2)).values()) == [0, 1]


def test_no_more_run_than_are_allowed() -> None:
    counter = get_context("fork").Value("i", 0)

    def work() -> int:
        with counter.get_lock():
            counter.value += 1
            running = counter.value
        threading.Event().wait(0.05)
        with counter.get_lock():
            counter.value -= 1
        return int(running)

    assert max(dict(side_by_side({str(n): work for n in range(6)}, 2)).values()) <= 2


@pytest.mark.parametrize("processes", [1, 2])
def test_the_exception_of_a_function_is_raised(processes: int) -> None:
    with pytest.raises(OSError, match="disk is full"):
        dict(side_by_side({"a": partial(fail, OSError(28, "disk is full"))}, processes))


def test_an_exception_that_cannot_be_sent_is_raised_as_its_text() -> None:
    with pytest.raises(RuntimeError, match="UnsendableError: no lowering"):
        dict(side_by_side({"a": partial(fail, UnsendableError("no lowering"))}, 2))


def test_a_process_that_was_killed_is_named() -> None:
    kill: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    with pytest.raises(ChildEnded) as raised:
        dict(side_by_side({"train": kill}, 2))
    assert (raised.value.name, raised.value.status) == ("train", -signal.SIGKILL)
    assert str(raised.value) == "the process for train was killed by signal 9 (SIGKILL)"


def test_an_exception_is_printed_where_it_was_raised(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"):
        dict(side_by_side({"a": partial(fail, ValueError("no"))}, 2))
    assert "in fail\n    raise error\nValueError: no" in capfd.readouterr().err


def test_a_failure_ends_the_other_processes_and_what_they_have_started() -> None:
    reading, writing = get_context("fork").Pipe(duplex=False)

    def wait() -> None:
        compiler = subprocess.Popen(["sleep", "1000"])
        writing.send((this_process(), compiler.pid))
        threading.Event().wait()

    def fail_later() -> None:
        while not reading.poll(0.1):
            pass
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        dict(side_by_side({"a": wait, "b": fail_later}, 2))
    process, compiler = reading.recv()
    assert has_ended(process)
    assert not runs(compiler)


def test_a_function_alongside_runs_at_the_same_time() -> None:
    barrier = get_context("fork").Barrier(2)
    with alongside("a", partial(barrier.wait, 60)) as result:
        mine = barrier.wait(60)
        assert {mine, result()} == {0, 1}


def test_its_exception_is_raised_where_its_result_is_wanted() -> None:
    with (
        alongside("a", partial(fail, ValueError("no"))) as result,
        pytest.raises(ValueError, match="no"),
    ):
        result()


def test_it_is_named_if_it_was_killed() -> None:
    kill: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    with (
        alongside("the data", kill) as result,
        pytest.raises(ChildEnded, match="the process for the data was killed by signal 9"),
    ):
        result()


def test_it_ends_with_the_block() -> None:
    reading, writing = get_context("fork").Pipe(duplex=False)

    def wait() -> None:
        writing.send(this_process())
        threading.Event().wait()

    with alongside("a", wait):
        process = reading.recv()
    assert has_ended(process)
