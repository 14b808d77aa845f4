"""Graphs are compiled and run deterministically within a context."""

from __future__ import annotations

import os

import pytest
import torch

from trainload.launching.node.determinism import deterministic

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def test_operators_are_deterministic_within_the_context() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() is before


def test_cublas_sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)
    with deterministic():
        assert os.environ[CUBLAS] == ":4096:8"


def test_a_setting_of_cublas_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    with deterministic():
        assert os.environ[CUBLAS] == ":16:8"


def test_nothing_changes_if_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)
    with deterministic(False):
        assert (torch.are_deterministic_algorithms_enabled(), CUBLAS in os.environ) == (
            False,
            False,
        )
