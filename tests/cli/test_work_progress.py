"""Progress of work whose length is not known."""

from __future__ import annotations

import io
import signal
import threading

import pytest
from rich.console import Console
from tests.waiting import wait_until

from trainload.cli.commands.shared import working
from trainload.cli.view.work_progress import WorkProgress


def console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, force_terminal=is_terminal), out


def test_without_a_terminal_lines_say_what_is_done() -> None:
    shown, out = console(is_terminal=False)
    with WorkProgress(shown, "verifying", plain_seconds=0.001) as progress:
        wait_until(lambda: out.getvalue().count("verifying: 0s\n") > 1)
        progress.update("comparing")
        wait_until(lambda: "comparing: 0s\n" in out.getvalue())


def test_short_work_without_a_terminal_prints_nothing() -> None:
    shown, out = console(is_terminal=False)
    with WorkProgress(shown, "verifying"):
        pass
    assert out.getvalue() == ""


def test_a_terminal_shows_what_is_done() -> None:
    shown, out = console(is_terminal=True)
    with WorkProgress(shown, "verifying"):
        wait_until(lambda: "verifying" in out.getvalue())


def test_no_thread_is_left_after_the_work() -> None:
    before = threading.active_count()
    with WorkProgress(console(is_terminal=False)[0], "verifying"):
        pass
    wait_until(lambda: threading.active_count() <= before)


def test_sigterm_interrupts_the_work() -> None:
    with pytest.raises(KeyboardInterrupt), working("verifying"):
        signal.raise_signal(signal.SIGTERM)
