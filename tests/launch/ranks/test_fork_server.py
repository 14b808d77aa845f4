"""The process from which ranks are forked: its clients, their processes, and its own end."""

from __future__ import annotations

import os
import select
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fork_servers import end_servers, server_pids

from trainload.core.errors import TrainingError
from trainload.launching.ranks.fork_server import Child, ForkServer
from trainload.launching.ranks.rank_messages import Failing, Prepare
from trainload.launching.ranks.server_socket import socket_path

SECONDS = 60.0
LONG = 1000.0
TASK = Prepare("no run", (0,), quiet=True, shares=False)


@pytest.fixture(scope="module")
def server(runtime: Path) -> Iterator[ForkServer]:
    with ForkServer.connect(LONG) as server:
        yield server


def answer(child: Child) -> Failing:
    """Return a rank's answer to a task that it cannot do."""
    child.connection.send(TASK)
    while True:
        message = child.connection.recv()
        if isinstance(message, Failing):
            return message


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_process_executes_tasks(server: ForkServer) -> None:
    child = server.fork("rank 0", {})
    assert "Invalid JSON" in answer(child).text
    child.kill()


def test_it_has_its_name_and_the_environment_of_its_client(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CLIENT", "1")
    child = server.fork("rank 12", {"OF_THE_RANK": "2"})
    answer(child)
    assert Path(f"/proc/{child.pid}/comm").read_text() == "rank 12\n"
    assert os.readlink(f"/proc/{child.pid}/cwd") == os.getcwd()
    child.kill()


def test_the_end_of_a_process_is_reported(server: ForkServer) -> None:
    child = server.fork("rank 0", {})
    assert child.exit_status(0) is None
    os.kill(child.pid, signal.SIGKILL)
    assert child.exit_status(SECONDS) == -signal.SIGKILL


def test_a_process_that_is_not_needed_any_more_ends(server: ForkServer) -> None:
    child = server.fork("rank 0", {})
    child.connection.close()
    assert child.exit_status(SECONDS) == 0


def test_clients_share_a_server_and_their_processes_end_with_them(
    server: ForkServer, runtime: Path
) -> None:
    mine = server.fork("rank 0", {})
    with ForkServer.connect(LONG) as other:
        theirs = other.fork("rank 1", {})
        assert is_alive(theirs.pid)
    assert theirs.exit_status(SECONDS) == -signal.SIGKILL
    assert mine.exit_status(0) is None
    assert len(server_pids(runtime)) == 1
    mine.kill()


def test_other_code_has_another_server(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = socket_path()
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    assert socket_path() != before


def test_a_folder_that_others_may_use_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "trainload").mkdir()
    (tmp_path / "trainload").chmod(0o777)
    with pytest.raises(PermissionError, match="this user alone"):
        socket_path()


def test_its_folder_is_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert stat.S_IMODE(socket_path().parent.stat().st_mode) == 0o700


@pytest.fixture
def another_runtime(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder whose servers are not shared with other tests."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path
    end_servers(tmp_path)


def ended(pid: int) -> bool:
    """Return True once a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    readable, _, _ = select.select([descriptor], [], [], SECONDS)
    os.close(descriptor)
    return bool(readable)


@pytest.mark.slow
def test_a_server_without_clients_ends(another_runtime: Path) -> None:
    with ForkServer.connect(0.0) as server:
        server.fork("rank 0", {})
        (pid,) = server_pids(another_runtime)
    assert ended(pid)
    assert not list(another_runtime.rglob("*.socket"))


@pytest.mark.slow  # test_node_actor.py kills the server of an actor
def test_a_server_that_was_killed_is_replaced(another_runtime: Path) -> None:
    with ForkServer.connect(LONG) as first:
        child = first.fork("rank 0", {})
        end_servers(another_runtime)
        assert child.exit_status(SECONDS) == -signal.SIGKILL
        with pytest.raises(TrainingError, match="from which ranks are forked has ended"):
            first.fork("rank 0", {})
        with ForkServer.connect(LONG) as second:
            assert is_alive(second.fork("rank 0", {}).pid)
