"""Connection of a driver to a Ray cluster: missing clusters, and the cluster's token."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from tests.ports import free_port

from trainload.core.errors import ClusterError
from trainload.launching.cluster import connection
from trainload.launching.cluster.connection import connected, connecting_early, present_token


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without a token, in which Ray has not been imported."""
    monkeypatch.setattr("os.environ", dict(os.environ) | {"HOME": str(tmp_path)})
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_an_address_where_nobody_listens_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        pytest.raises(ClusterError, match=f"address {address}: no Ray cluster responds"),
        connected(address),
    ):
        pass


def test_a_server_that_never_responds_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RESPONSE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with (
            pytest.raises(ClusterError, match="it accepts connections, but does not respond"),
            connected(address),
        ):
            pass


def test_a_process_that_is_connected_uses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("it was shut down"))
    with connected(f"127.0.0.1:{free_port()}"):
        pass


@pytest.mark.parametrize("place", ["environment", "file", "home"])
def test_a_token_is_presented(place: str, tmp_path: Path) -> None:
    if place == "environment":
        os.environ["RAY_AUTH_TOKEN"] = "secret"
    else:
        path = tmp_path / ("token" if place == "file" else ".ray/auth_token")
        path.parent.mkdir(exist_ok=True)
        path.write_text("secret")
        if place == "file":
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    assert present_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_without_a_token_none_is_presented() -> None:
    present_token()
    assert "RAY_AUTH_MODE" not in os.environ


def test_the_users_mode_stays() -> None:
    os.environ |= {"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"}
    present_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_token_that_ray_would_not_read_any_more_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray  # noqa: F401

    os.environ["RAY_AUTH_TOKEN"] = "secret"
    monkeypatch.setattr(connection, "check_listener", lambda address: None)
    monkeypatch.setattr(connection, "asks_for_token", lambda address: True)
    with (
        pytest.raises(ClusterError, match="Ray was imported without the cluster's token"),
        connected("head:6379"),
    ):
        pass


# Connecting early


class FakeRay:
    """Stands for the module `ray` of a connection."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def shutdown(self) -> None:
        self.ended.set()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeRay]:
    """Connections that were made."""
    found: list[FakeRay] = []

    def connect(address: str | None) -> FakeRay:
        if address == "missing":
            raise ClusterError("no Ray cluster responds")
        found.append(FakeRay())
        return found[-1]

    monkeypatch.setattr(connection, "_connect", connect)
    monkeypatch.setattr(connection, "_own_fork_server", lambda: nullcontext(Path("socket")))
    return found


def test_a_connection_that_was_begun_early_is_used(made: list[FakeRay]) -> None:
    with connecting_early("head:6379"), connected("head:6379"):
        assert not made[0].ended.is_set()
    assert len(made) == 1
    assert made[0].ended.is_set()


def test_it_is_used_once(made: list[FakeRay]) -> None:
    with connecting_early("head:6379"):
        for _ in range(2):
            with connected("head:6379"):
                pass
    assert len(made) == 2


def test_one_that_is_not_used_is_ended(made: list[FakeRay]) -> None:
    def work() -> None:
        with connecting_early(None):
            raise ValueError("the package is damaged")

    with pytest.raises(ValueError, match="damaged"):
        work()
    assert [each.ended.is_set() for each in made] == [True]


def test_one_that_is_over_before_its_fork_server_runs_is_not_made(
    made: list[FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run = threading.Event()
    join = threading.Thread.join

    @contextmanager
    def slow_fork_server() -> Iterator[Path]:
        may_run.wait()
        yield Path("socket")

    def join_later(thread: threading.Thread, timeout: float | None = None) -> None:
        may_run.set()
        join(thread, timeout)

    monkeypatch.setattr(connection, "_own_fork_server", slow_fork_server)
    monkeypatch.setattr(threading.Thread, "join", join_later)
    with connecting_early(None):
        pass
    assert made == []


def test_its_error_is_raised_when_it_is_used(made: list[FakeRay]) -> None:
    with connecting_early("missing"):
        pass
    with connecting_early("missing"), pytest.raises(ClusterError), connected("missing"):
        pass
    assert made == []


@pytest.mark.parametrize("address", [None, "head:6379"])
def test_only_a_local_cluster_ends_with_the_connection(
    address: str | None, made: list[FakeRay]
) -> None:
    with connected(address) as found:
        assert found.is_temporary == (address is None)
        assert found.fork_server == (Path("socket") if address is None else None)
    assert len(made) == 1


def test_a_fork_server_that_cannot_be_started_is_an_error_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ClusterError, match="missing: the process from which"), connected(None):
        pass


def test_without_ranks_a_local_cluster_has_no_fork_server(made: list[FakeRay]) -> None:
    with connected(None, with_ranks=False) as found:
        assert found.fork_server is None
