"""Command lines and functions in processes that are forked instead of newly started.

The fork server of `tests/ranks.py` has imported torch and trainload and has done nothing else, so
the processes share nothing that the current process has imported or registered.
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
    """A command line that runs in a process.

    Attributes:
        process: the process.
        out: what it has written to standard output so far.
        err: what it has written to standard error so far.
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

    @property
    def has_begun(self) -> bool:
        """True if the process has opened its standard error."""
        return self._err.exists()

    def wait(self) -> int:
        """Wait for the process to end, and return its exit status."""
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, f"it has not ended: {self.err}"
        return self.process.exitcode

    def close(self) -> None:
        """Kill the process if it has not ended."""
        end([self.process])
        self._folder.cleanup()


@contextmanager
def command(
    *words: str | Path, cwd: Path, first: Callable[[], object] | None = None, **variables: str
) -> Iterator[Command]:
    """Run a command line within the block; kill it if it has not ended by then.

    Args:
        words: arguments without the program's name.
        cwd: working directory.
        first: module-level function that the process calls before the command line.
        variables: environment variables in addition to those of this process.
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
    """Start a command in its own session and send it a signal once `ready` returns true.

    SIGINT is sent to the whole process group, as a terminal does; other signals only to the
    command. `torchrun`: start the command with torchrun on two ranks.
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
    """Start a command on its own terminal, and close the terminal once `ready` returns true.

    The session receives SIGHUP, and its output has nowhere to go.
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
    """Start a session with this controlling terminal, which is the first that its leader opens."""
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for stream in range(3):
        os.dup2(terminal, stream)
    os.close(terminal)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def torchrun_done(*words: str | Path, cwd: Path) -> tuple[int, str, str]:
    """Run a command line with torchrun on two ranks; return exit status, stdout and stderr."""
    with _started(words, cwd, None, {}, _torchrun) as started:
        status = started.wait()
        return status, started.out, started.err


def left_in(leader: int, seconds: float = 20.0) -> list[str]:
    """Return the command lines of a session's processes that are still alive after `seconds`."""
    return left_after(lambda: _of_session(leader), seconds)


def _of_session(leader: int) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state != "Z":
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # the process has ended
                continue
    return found


def done(
    *words: str | Path, cwd: Path, first: Callable[[], object] | None = None, **variables: str
) -> tuple[int, str, str]:
    """Run a command line; return its exit status, stdout and stderr."""
    with command(*words, cwd=cwd, first=first, **variables) as started:
        status = started.wait()
        return status, started.out, started.err


def json_said(*words: str | Path, cwd: Path, first: Callable[[], object] | None = None) -> Any:
    """Return the parsed output of a command with --json, whose stdout is JSON and nothing else."""
    status, out, err = done(*words, "--json", cwd=cwd, first=first)
    assert status == 0, err
    return json.loads(out)


def refused_apart(
    words: Sequence[str | Path],
    folder: Path,
    first: Callable[[], object] | None = None,
    **variables: str,
) -> str:
    """Check that a command exits with status 2 and one line, and does not change `folder`.

    Return the line.
    """
    before = contents(folder)
    status, out, err = done(*words, cwd=folder, first=first, **variables)
    assert status == 2, err
    return the_line(out, err, before, folder)


def write_no_bytecode() -> None:
    """Disable the writing of bytecode files."""
    sys.dont_write_bytecode = True


def let_no_file_grow() -> None:
    """Limit the size of files to 500 bytes, and disable the writing of bytecode files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
    write_no_bytecode()


def _command(words: list[str], err: Path, first: Callable[[], object] | None) -> None:
    from trainload.cli.main import main

    with err.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, os.getcwd())  # as under `python -m trainload`
    sys.argv = ["trainload", *words]
    if first is not None:
        first()
    main()


def _torchrun(words: list[str], err: Path, first: Callable[[], object] | None) -> None:
    """Call torchrun's launcher with forked ranks that call the command line.

    This avoids a new interpreter per rank.
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

    # torchrun puts each rank into its own process group, which terminal signals do not reach
    os.setpgid(0, 0)
    # the handlers of a new interpreter instead of those inherited from torchrun's process
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, os.getcwd())
    sys.argv = ["trainload", *words]
    main()


class Talk:
    """A process whose standard input and output are connected to this process."""

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
        """Wait for the next line, and return it without its newline."""
        return self.heard.readline().removesuffix("\n")

    def hear_all(self) -> list[str]:
        """Wait for the process to end, and return the lines that were not yet read."""
        found = self.heard.read().splitlines()
        self.process.join()
        return found

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        end([self.process])

    def end_input(self) -> None:
        self._ours.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kill the process if it has not ended."""
        end([self.process])
        self.heard.close()
        self._ours.close()


@contextmanager
def talking(
    act: Callable[..., None], *arguments: Any, ignored: Sequence[int] = ()
) -> Iterator[Talk]:
    """Call a module-level function in a process; kill the process if the block ends first.

    `ignored`: signals that the process ignores from its start, as under `nohup`.
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
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing closes stdin
    act(*arguments)
