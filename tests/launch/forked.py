"""Command lines and scripts in processes of their own that need no interpreter of their own: they are forked from the server of
`tests/ranks.py`, which has torch and trainload imported and has done nothing else. None has what this process has imported or registered.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.launch.commands import contents, the_line
from tests.ranks import SECONDS, end, fork_server, start


class Command:
    """A command line that has been started in a process.

    Attributes:
        process: the process. out, err: what it has written so far to standard output and to standard error.
    """

    def __init__(self, words: Sequence[str | Path], cwd: Path, first: Callable[[], object] | None, variables: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        environment = {**os.environ, **variables}
        self.process = start(_command, [str(word) for word in words], self._err, first, cwd=cwd, log=self._out, variables=environment)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self) -> int:
        """Wait for its end.

        Returns:
            its exit status.
        """
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, f"it has not ended: {self.err}"
        return self.process.exitcode

    def close(self) -> None:
        """Kill it where it has not ended."""
        end([self.process])
        self._folder.cleanup()


@contextmanager
def command(*words: str | Path, cwd: Path, first: Callable[[], object] | None = None, **variables: str) -> Iterator[Command]:
    """A command line, killed where the block ends before it does.

    Args:
        words: without the program's name.
        cwd: its current folder.
        first: a function of a module, which is called before it in its process.
        variables: of the environment, beside those of this process.
    """
    started = Command(words, cwd, first, variables)
    try:
        yield started
    finally:
        started.close()


def done(*words: str | Path, cwd: Path, first: Callable[[], object] | None = None, **variables: str) -> tuple[int, str, str]:
    """Run a command line.

    Returns:
        its exit status, what it printed, and what it said.
    """
    with command(*words, cwd=cwd, first=first, **variables) as started:
        status = started.wait()
        return status, started.out, started.err


def json_said(*words: str | Path, cwd: Path, first: Callable[[], object] | None = None) -> Any:
    """Return what a command with --json says on stdout, which is JSON and nothing else."""
    status, out, err = done(*words, "--json", cwd=cwd, first=first)
    assert status == 0, err
    return json.loads(out)


def refused_apart(words: Sequence[str | Path], folder: Path, first: Callable[[], object] | None = None, **variables: str) -> str:
    """Demand that a command ends with status 2, says one line, and leaves `folder` as it is. Returns: the line."""
    before = contents(folder)
    status, out, err = done(*words, cwd=folder, first=first, **variables)
    assert status == 2, err
    return the_line(out, err, before, folder)


def write_no_bytecode() -> None:
    """Import without writing compiled files beside the source."""
    sys.dont_write_bytecode = True


def let_no_file_grow() -> None:
    """Limit files to 500 bytes, and write no compiled ones."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
    write_no_bytecode()


def _command(words: list[str], err: Path, first: Callable[[], object] | None) -> None:
    from trainload.cli import main

    with err.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, os.getcwd())  # as `python -m trainload` has it
    sys.argv = ["trainload", *words]
    if first is not None:
        first()
    main()


class Talk:
    """A process that this one talks with: what is said to it is its standard input, and what it prints is heard."""

    def __init__(self, act: Callable[..., None], arguments: Sequence[Any], ignored: Sequence[int]) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.process: ForkServerProcess = fork_server().Process(target=_talk, args=(act, arguments, theirs, tuple(ignored)))
            self.process.start()
        self.heard = self._ours.makefile("r")

    def say(self, line: str) -> None:
        self._ours.sendall(f"{line}\n".encode())

    def hear(self) -> str:
        """Wait for the next line. Returns: it, without its end."""
        return self.heard.readline().removesuffix("\n")

    def hear_all(self) -> list[str]:
        """Wait for the process's end. Returns: the lines that it had left to say."""
        found = self.heard.read().splitlines()
        self.process.join()
        return found

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        end([self.process])

    def end_input(self) -> None:
        self._ours.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kill it where it has not ended."""
        end([self.process])
        self.heard.close()
        self._ours.close()


@contextmanager
def talking(act: Callable[..., None], *arguments: Any, ignored: Sequence[int] = ()) -> Iterator[Talk]:
    """A process that calls `act(*arguments)`, a function of a module, killed where the block ends before it does.

    ignored: signals that it ignores from its beginning, as `nohup` has it.
    """
    talk = Talk(act, arguments, ignored)
    try:
        yield talk
    finally:
        talk.close()


def _talk(act: Callable[..., None], arguments: Sequence[Any], line: socket.socket, ignored: Sequence[int]) -> None:
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for stream in (0, 1):
        os.dup2(line.fileno(), stream)
    line.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing gives its processes none
    act(*arguments)
