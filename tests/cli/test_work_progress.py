"""Progress of work whose length is not known."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console
from tests.launch.tiny import tiny_job
from tests.waiting import wait_until

import trainload
from trainload.cli import main as cli
from trainload.cli.commands.shared import Transfer, working
from trainload.cli.view.work_progress import WorkProgress
from trainload.core.formatting import size as formatted
from trainload.core.work_steps import ByteStep, begin_step, steps_shown


def console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80, force_terminal=is_terminal), out


@contextmanager
def terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A stream to a terminal, and a function that returns what was written to it so far."""
    leader, follower = pty.openpty()
    written = bytearray()

    def read() -> None:
        while True:
            try:
                block = os.read(leader, 65536)
            except OSError:  # the stream was closed
                return
            written.extend(block)

    reader = threading.Thread(target=read)
    with open(follower, "w", encoding="utf-8") as stream:
        reader.start()
        yield stream, lambda: written.decode()
    reader.join()
    os.close(leader)


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


def test_steps_of_the_work_replace_its_title() -> None:
    shown, out = console(is_terminal=False)
    with WorkProgress(shown, "filling", plain_seconds=0.001) as progress:
        with steps_shown(progress.update):
            ByteStep("writing weights", 3 * 2**20).add(2**20)
        wait_until(lambda: "writing weights, 1.0 MiB of 3.0 MiB: 0s\n" in out.getvalue())


def test_steps_are_shown_to_nobody_after_the_block() -> None:
    steps: list[str] = []
    with steps_shown(steps.append):
        begin_step("first")
    begin_step("second")
    assert steps == ["first"]


@pytest.fixture(scope="module")
def steps_of_a_freeze(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Steps of a freeze, and its package."""
    steps: list[str] = []
    path = tmp_path_factory.mktemp("frozen") / "tiny.tl"
    with steps_shown(steps.append):
        trainload.freeze(tiny_job, path)
    return steps, path


def test_a_freeze_names_its_steps_in_order(steps_of_a_freeze: tuple[list[str], Path]) -> None:
    expected = [
        "tracing graph train (1 of 2)",
        "comparing graph train with eager PyTorch",
        "tracing graph eval (2 of 2)",
        "finding the guards of the graphs",
        "capturing the update of group 1 of 1",
        "deriving the joint graph of train",
        "comparing the joint graph of train with autograd",
        "comparing halves of the batch with all of it",
        "comparing first values with the model's",
        "writing the graphs",
        "checking the package",
        "storing the joint graphs",
    ]
    assert [step for step in steps_of_a_freeze[0] if step in expected] == expected


def test_a_freeze_counts_the_bytes_of_its_weights(
    steps_of_a_freeze: tuple[list[str], Path],
) -> None:
    counts = [step for step in steps_of_a_freeze[0] if step.startswith("writing weights, ")]
    size = sum(parameter.nbytes for parameter in tiny_job().model.parameters())
    assert counts[0].startswith("writing weights, 0 bytes of ")
    assert counts[-1] == f"writing weights, {formatted(size)} of {formatted(size)}"


def test_a_verification_counts_the_bytes_of_its_files(
    steps_of_a_freeze: tuple[list[str], Path],
) -> None:
    steps: list[str] = []
    with steps_shown(steps.append):
        trainload.verify(steps_of_a_freeze[1])
    files = trainload.open(steps_of_a_freeze[1]).manifest.files.values()
    total = formatted(sum(entry.size for entry in files))
    assert f"reading every byte, {total} of {total}" in steps


def test_steps_on_a_terminal_leave_stdout_to_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("from tests.launch.tiny import tiny_job\n")
    monkeypatch.chdir(tmp_path)
    with terminal() as (stream, read):
        monkeypatch.setattr("sys.stderr", stream)
        status = cli.run(["freeze", "mine.py:tiny_job", "-o", "tiny.tl", "--json"])
    assert status == 0
    assert json.loads(capsys.readouterr().out)["package"] == "tiny.tl"
    assert "storing the joint graphs" in read()  # the last step, which is drawn at the end


def test_forced_colors_in_a_pipe_redraw_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with working("verifying"), Transfer("push") as transfer:
        transfer(1, 2)
    assert capsys.readouterr().err == ""


def test_a_transfer_is_shown_before_its_size_is_known() -> None:
    with terminal() as (stream, read), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        with Transfer("push"):
            wait_until(lambda: "push" in read())
