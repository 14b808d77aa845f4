"""Connection of a driver to a Ray cluster: environment variables, and missing clusters."""

from __future__ import annotations

import os

import pytest
import ray
from tests.ports import free_port

from trainload.core.errors import ClusterError
from trainload.launching.cluster.connection import connect

SET = (
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
    "RAY_CHDIR_TO_TRIAL_DIR",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment without the variables that a connection sets; restored after the test."""
    for name in SET:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_an_address_where_nobody_listens_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match=f"address {address}: no Ray cluster responds"):
        connect(address)


def test_who_is_connected_already_gets_what_ray_train_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert not connect(None)
    assert {name: os.environ[name] for name in SET[:3]} == dict(
        zip(SET, ("0.2", "0", "0"), strict=False)
    )
