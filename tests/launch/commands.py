"""Runs the command line, in this process and in others."""

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
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(arguments: list[str | Path], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Check that a command ends with status 2, says one line, and leaves `folder` as it is.

    Returns the line.
    """
    before = contents(folder)
    assert cli.run([str(part) for part in arguments]) == 2
    printed = capsys.readouterr()
    return the_line(printed.out, printed.err, before, folder)


def refused_process(
    arguments: list[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> str:
    """The same in a new interpreter, in `folder`."""
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
    """What a command with --json says on stdout, which is JSON and nothing else."""
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
    """How a command ended that was interrupted. left: command lines of processes that it left
    behind.
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
    """Starts a command in a session of its own and, once `ready`, does what a terminal does at
    Ctrl-C: SIGINT to the process group; or what a machine does that shuts down: SIGTERM to the
    process.
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
    """Starts a command on a terminal of its own, which is closed once it is `ready`: SIGHUP to all
    there, and nowhere to write.
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
    """The command lines of processes with `mark` in their environment that are alive after so many
    seconds.
    """
    return left_after(lambda: list(_marked(mark).values()), seconds)


def left_after(alive: Callable[[], list[str]], seconds: float) -> list[str]:
    """Return what `alive` still lists after so many seconds; nothing as soon as it lists
    nothing.
    """
    deadline = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def kill_all(mark: str) -> None:
    """Kill the processes with `mark` in their environment, and those that they start meanwhile.

    Return when there are none.
    """

    def kill() -> None:
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    wait_until(lambda: not _marked(mark), meanwhile=kill)


def _new_mark() -> tuple[str, dict[str, str]]:
    """What tells a command's processes from all others: a line of their environment, and the same
    as a mapping.
    """
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
            except OSError:  # it has ended, or is not ours
                continue
    return found
