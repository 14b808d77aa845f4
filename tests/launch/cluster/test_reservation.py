"""Reservation of devices on a Ray cluster of one node with two CPUs."""

from __future__ import annotations

import pytest
import ray

from trainload.launching.cluster import reservation
from trainload.launching.cluster.reservation import DevicesTakenError, reserve, reserved

MISSING = "0" * 56
"""Id of a node that the cluster does not have."""


def test_devices_of_several_nodes_are_reserved_all_or_none(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ray.get_runtime_context().get_node_id()
    # A new cluster's first group takes a second. Ray (2.60) never frees the devices of a group that
    # is removed while its node is reserving them.
    with reserved(here, "CPU", 1):
        pass
    with monkeypatch.context() as impatient:
        impatient.setattr(reservation, "RESERVE_SECONDS", 5.0)
        with pytest.raises(DevicesTakenError):
            reserve({here: 1, MISSING: 1}, "CPU")
    with reserved(here, "CPU", 2):
        pass


def test_devices_that_are_in_use_are_taken(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ray.get_runtime_context().get_node_id()
    with reserved(here, "CPU", 2):
        monkeypatch.setattr(reservation, "RESERVE_SECONDS", 1.0)
        with pytest.raises(DevicesTakenError), reserved(here, "CPU", 1):
            pass
