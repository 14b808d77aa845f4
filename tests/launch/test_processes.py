"""What tells a process from all others."""

from __future__ import annotations

import os
import subprocess
import sys

from trainload.launch.processes import has_ended, this_process


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
    code = "from trainload.launch.processes import this_process; print(this_process())"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        said = child.stdout.read().strip() if child.stdout is not None else ""
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(said) is True
