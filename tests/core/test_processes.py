"""Identity of processes, and the signals that end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainload.core.processes import has_ended, interrupted_by_signals, this_process
from trainload.launching.run.contact import Request, asked_by_file
from trainload.launching.worker.local_run import _stop_on_interrupt


def test_this_process_has_not_ended() -> None:
    assert has_ended(this_process()) is False


def test_nothing_is_known_of_a_process_of_another_machine() -> None:
    assert has_ended("another-boot pid:[1] 1 1") is None


def test_nothing_is_known_of_a_process_that_did_not_say_what_it_is() -> None:
    assert has_ended("") is None


def test_a_process_whose_number_is_used_again_has_ended() -> None:
    parts = this_process().split(" ")
    assert has_ended(" ".join([*parts[:2], str(os.getpid()), "1"])) is True


def test_a_child_that_has_ended_and_was_not_waited_for_has_ended() -> None:
    code = "from trainload.core.processes import this_process; print(this_process())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        said = child.stdout.read().strip() if child.stdout is not None else ""
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(said) is True


def test_sigterm_is_an_interrupt_and_then_what_it_was() -> None:
    def work() -> None:
        with interrupted_by_signals():
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_the_caller_has_set_stays(tmp_path: Path) -> None:
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: heard.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with interrupted_by_signals():
            signal.raise_signal(signal.SIGTERM)
        with _stop_on_interrupt(tmp_path):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert asked_by_file(tmp_path) is Request.NONE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]


def test_an_interrupt_that_python_ignores_is_repeated() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def work() -> None:
        with interrupted_by_signals():
            Finalized()
            threading.Event().wait(60)

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_process_with_ray_is_not_aborted_after_sigterm() -> None:
    program = """
import signal
import ray
from trainload.core.processes import interrupted_by_signals

with interrupted_by_signals():
    signal.alarm(60)  # as Ray's handler does
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        print(signal.alarm(0))
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "0\n"


def test_another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def look() -> None:
        with interrupted_by_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_without_ray_is_asked_to_stop_and_then_ended(
    tmp_path: Path, number: signal.Signals
) -> None:
    asked = []

    def work() -> None:
        with _stop_on_interrupt(tmp_path):
            signal.raise_signal(number)
            asked.append(asked_by_file(tmp_path))
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert asked == [Request.STOP]
    assert signal.getsignal(number) is before
    assert asked_by_file(tmp_path) is Request.NONE
