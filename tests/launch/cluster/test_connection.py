"""Connection of a driver to a Ray cluster: missing clusters, and the cluster's token."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.ports import free_port

from trainload.core.errors import ClusterError
from trainload.launching.cluster import connection
from trainload.launching.cluster.connection import connected, present_token


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
