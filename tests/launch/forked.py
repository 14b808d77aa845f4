"""Command lines and scripts in processes of their own that need no interpreter of their own: they
are forked from the server of `tests/ranks.py`, which has torch and trainload imported and has done
nothing else. None has what this process has imported or registered.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.launch.commands import Interrupted, contents, left_after, the_line
from tests.ranks import SECONDS, end, fork_server, start
from tests.waiting import wait_until


class Command:
    """A command line that has been started in a process.

    Attributes:
        process: the process. out, err: what it has written so far to standard output and to
            standard error.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        cwd: Path,
        first: Callable[[], object] | None,
        variables: dict[str, str],
        act: Callable[..., None],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._out, self._err = (Path(self._folder.name) / name for name in ("out", "err"))
        environment = {**os.environ, **variables}
        self.process = start(
            act,
            [str(word) for word in words],
            self._err,
            first,
            cwd=cwd,
            log=self._out,
            variables=environment,
        )

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
def command(
    *words: str | Path, cwd: Path, first: Callable[[], object] | None = None, **variables: str
) -> Iterator[Command]:
    """A command line, killed where the block ends before it does.

    Args:
        words: without the program's name.
        cwd: its current folder.
        first: a function of a module, which is called before it in its process.
        variables: of the environment, beside those of this process.
    """
    with _started(words, cwd, first, variables, _command) as started:
        yield started


@contextmanager
def _started(
    words: Sequence[str | Path],
    cwd: Path,
    first: Callable[[], object] | None,
    variables: dict[str, str],
    act: Callable[..., None],
) -> Iterator[Command]:
    started = Command(words, cwd, first, variables, act)
    try:
        yield started
    finally:
        started.close()


def interrupted(
    words: Sequence[str | Path],
    cwd: Path,
    ready: Callable[[], bool],
    number: signal.Signals,
    *,
    torchrun: bool = False,
) -> Interrupted:
    """Start a command in a session of its own and, once it is `ready`, send it a signal: SIGINT to
    all of the session, as a terminal does.

    torchrun: by torchrun, on two ranks.
    """
    with _started(words, cwd, os.setsid, {}, _torchrun if torchrun else _command) as started:
        leader = started.process.pid
        assert leader is not None

        def demand_alive() -> None:
            assert started.process.is_alive(), started.err

        wait_until(ready, meanwhile=demand_alive)
        (os.killpg if number == signal.SIGINT else os.kill)(leader, number)
        status = started.wait()
        return Interrupted(status, started.err, left_in(leader))


def terminal_closed(
    words: Sequence[str | Path], cwd: Path, ready: Callable[[], bool]
) -> Interrupted:
    """Start a command on a terminal of its own, which is closed once it is `ready`: SIGHUP to all
    there, and nowhere to write.
    """
    master, slave = os.openpty()
    with _started(
        words, cwd, partial(_take_terminal, os.ttyname(slave)), {"TERM": "xterm"}, _command
    ) as started:
        leader = started.process.pid
        assert leader is not None
        shown = bytearray()
        os.set_blocking(master, False)

        def show() -> None:
            assert started.process.is_alive(), shown.decode()
            with suppress(BlockingIOError):
                shown.extend(os.read(master, 1 << 16))

        wait_until(ready, meanwhile=show)
        for end_of_it in (slave, master):
            os.close(end_of_it)
        status = started.wait()
        return Interrupted(status, shown.decode(), left_in(leader))


def _take_terminal(name: str) -> None:
    """Begin a session whose terminal this is. The first one that its leader opens is."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for stream in range(3):
        os.dup2(terminal, stream)
    os.close(terminal)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def torchrun_done(*words: str | Path, cwd: Path) -> tuple[int, str, str]:
    """Run a command line by torchrun on two ranks.

    Returns:
        its exit status, what all of them printed, and what they said.
    """
    with _started(words, cwd, None, {}, _torchrun) as started:
        status = started.wait()
        return status, started.out, started.err


def left_in(leader: int, seconds: float = 20.0) -> list[str]:
    """Return the command lines of a session's processes that are alive after so many seconds."""
    return left_after(lambda: _of_session(leader), seconds)


def _of_session(leader: int) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it has ended
                continue
    return found


def done(
    *words: str | Path, cwd: Path, first: Callable[[], object] | None = None, **variables: str
) -> tuple[int, str, str]:
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


def refused_apart(
    words: Sequence[str | Path],
    folder: Path,
    first: Callable[[], object] | None = None,
    **variables: str,
) -> str:
    """Check that a command ends with status 2, says one line, and leaves `folder` as it is.

    Returns: the line.
    """
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
    from trainload.cli.main import main

    with err.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, os.getcwd())  # as `python -m trainload` has it
    sys.argv = ["trainload", *words]
    if first is not None:
        first()
    main()


def _torchrun(words: list[str], err: Path, first: Callable[[], object] | None) -> None:
    """Call torchrun's own launcher, whose ranks are forked and call the command line where it would
    start an interpreter for each.
    """
    from torch.distributed import run

    with err.open("wb") as file:
        os.dup2(file.fileno(), 2)
    if first is not None:
        first()
    made = run.config_from_args

    def forked(args: Any) -> tuple[Any, Callable[..., Any] | str, list[str]]:
        config, _, _ = made(args)
        return dataclasses.replace(config, start_method="fork"), _torchrun_rank, words

    run.config_from_args = forked
    run.main(["--standalone", "--nproc-per-node", "2", "-m", "trainload", *words])


def _torchrun_rank(*words: str) -> None:
    from trainload.cli.main import main

    # torchrun has each in a group of its own, which a terminal's signals do not reach
    os.setpgid(0, 0)
    # as an interpreter has them, and not as torchrun's process does
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, os.getcwd())
    sys.argv = ["trainload", *words]
    main()


class Talk:
    """A process that this one talks with: what is said to it is its standard input, and what it
    prints is heard.
    """

    def __init__(
        self, act: Callable[..., None], arguments: Sequence[Any], ignored: Sequence[int]
    ) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.process: ForkServerProcess = fork_server().Process(
                target=_talk, args=(act, arguments, theirs, tuple(ignored))
            )
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
def talking(
    act: Callable[..., None], *arguments: Any, ignored: Sequence[int] = ()
) -> Iterator[Talk]:
    """A process that calls `act(*arguments)`, a function of a module, killed where the block ends
    before it does.

    ignored: signals that it ignores from its beginning, as `nohup` has it.
    """
    talk = Talk(act, arguments, ignored)
    try:
        yield talk
    finally:
        talk.close()


def _talk(
    act: Callable[..., None], arguments: Sequence[Any], line: socket.socket, ignored: Sequence[int]
) -> None:
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for stream in (0, 1):
        os.dup2(line.fileno(), stream)
    line.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing gives its processes none
    act(*arguments)
