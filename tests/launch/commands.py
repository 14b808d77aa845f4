"""Helpers that run the command line, in this process and in others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from trainload.cli import main as cli

TRAINLOAD = (sys.executable, "-m", "trainload")
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "trainload",
)


def contents(folder: Path) -> list[str]:
    """Return the paths of everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(arguments: list[str | Path], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Check that a command exits with status 2 and one line, and does not change `folder`.

    Return the line.
    """
    before = contents(folder)
    assert cli.run([str(part) for part in arguments]) == 2
    printed = capsys.readouterr()
    return the_line(printed.out, printed.err, before, folder)


def refused_process(
    arguments: list[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Check the same as `refused` for a command in a new interpreter, run in `folder`."""
    before = contents(folder)
    command = [*TRAINLOAD, *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return the_line(done.stdout, done.stderr, before, folder)


def the_line(out: str, err: str, before: list[str], folder: Path) -> str:
    assert out == ""
    (line,) = err.splitlines()
    assert contents(folder) == before
    return line


def json_of(*arguments: str | Path, cwd: Path, program: Sequence[str] = TRAINLOAD) -> Any:
    """Return the parsed output of a command with --json, whose stdout is JSON and nothing else."""
    done = subprocess.run(
        [*program, *map(str, arguments), "--json"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Result of an interrupted command.

    `left`: command lines of the processes that it left running.
    """

    status: int
    err: str
    left: list[str]


def interrupt(
    arguments: list[str | Path],
    cwd: Path,
    ready: Callable[[], bool],
    environment: Mapping[str, str],
    program: Sequence[str] = TRAINLOAD,
    *,
    terminate: bool = False,
) -> Interrupted:
    """Start a command in its own session and interrupt it once `ready` returns true.

    The interruption is SIGINT to the process group, as Ctrl-C in a terminal sends it. With
    `terminate`, it is SIGTERM to the process, as on shutdown of the machine.
    """
    mark, marked = _new_mark()
    process = subprocess.Popen(
        [*program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment, **marked},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not ready():
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {process.communicate()[1]}")
        time.sleep(0.05)
    if terminate:
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    return Interrupted(process.returncode, err, wait_until_gone(mark))


def close_terminal(
    arguments: list[str | Path], cwd: Path, ready: Callable[[], bool]
) -> Interrupted:
    """Start a command on its own terminal, and close the terminal once `ready` returns true.

    The session receives SIGHUP, and its output has nowhere to go.
    """
    mark, marked = _new_mark()
    master, slave = os.openpty()
    process = subprocess.Popen(
        ["env", "--default-signal=HUP", "setsid", "--ctty", *TRAINLOAD, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "TERM": "xterm", **marked},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = bytearray()
    os.set_blocking(master, False)
    while not ready():
        if process.poll() is not None:
            raise AssertionError(f"it ended with {process.returncode}: {shown.decode()}")
        with suppress(BlockingIOError):
            shown += os.read(master, 1 << 16)
        time.sleep(0.05)
    os.close(master)
    return Interrupted(process.wait(timeout=120), shown.decode(), wait_until_gone(mark))


def wait_until_gone(mark: str, seconds: float = 20.0) -> list[str]:
    """Return the command lines of processes with `mark` in their environment.

    Wait up to `seconds` for these processes to end.
    """
    return left_after(lambda: list(_marked(mark).values()), seconds)


def left_after(alive: Callable[[], list[str]], seconds: float) -> list[str]:
    """Return what `alive` still lists after `seconds`, or an empty list as soon as it is empty."""
    deadline = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill_all(mark: str) -> None:
    """Kill the processes with `mark` in their environment, and those that they start meanwhile.

    Return when there are none left.
    """

    def kill() -> None:
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    wait_until(lambda: not _marked(mark), meanwhile=kill)


def _new_mark() -> tuple[str, dict[str, str]]:
    """Return an environment variable that marks a command's processes: as a line, and as a dict."""
    name, value = "TRAINLOAD_TEST_MARK", f"{os.getpid()}-{time.monotonic_ns()}"
    return f"{name}={value}", {name: value}


def _marked(mark: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (
                        (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:  # the process has ended, or belongs to another user
                continue
    return found
