"""Copies of values that are compared later."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from trainload.launching.verification import stored_copies
from trainload.launching.verification.stored_copies import HostCopies, StoredCopy, loaded


@pytest.fixture(autouse=True)
def all_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_copies, "IN_FILE", 1)
    monkeypatch.setattr(stored_copies, "_PART", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(100,), (7, 9), (), (0, 3)])
def test_a_copy_has_the_value(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    copy = HostCopies([tmp_path]).copy(value)
    assert isinstance(copy, StoredCopy) or not value.numel()
    assert torch.equal(loaded(copy), value)
    assert loaded(copy).dtype == dtype


def test_copies_do_not_change_with_the_value(tmp_path: Path) -> None:
    copies, value = HostCopies([tmp_path]), torch.arange(50.0)
    first = copies.copy(value)
    value.zero_()
    second = copies.copy(value)
    assert torch.equal(loaded(first), torch.arange(50.0))
    assert torch.equal(loaded(second), torch.zeros(50))


def test_a_part_is_read_alone(tmp_path: Path) -> None:
    copy = HostCopies([tmp_path]).copy(torch.arange(100, dtype=torch.bfloat16))
    part = copy[20:45]
    assert len(part) == 25
    assert torch.equal(loaded(part[5:7]), torch.tensor([25, 26], dtype=torch.bfloat16))


def test_values_that_are_not_contiguous_are_copied(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(loaded(HostCopies([tmp_path]).copy(value)), value)


def test_no_file_is_left(tmp_path: Path) -> None:
    copy = HostCopies([tmp_path]).copy(torch.ones(9))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(loaded(copy), torch.ones(9))


def test_another_folder_is_used_if_one_cannot_be_written(tmp_path: Path) -> None:
    copy = HostCopies([tmp_path / "missing"]).copy(torch.ones(9))
    assert isinstance(copy, StoredCopy)


def test_a_full_disk_leaves_the_copy_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with caplog.at_level(logging.DEBUG):
        copy = HostCopies([tmp_path]).copy(torch.ones(9))
    assert isinstance(copy, torch.Tensor)
    assert torch.equal(copy, torch.ones(9))
    assert "copied to memory" in caplog.text


def test_small_values_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_copies, "IN_FILE", 10**6)
    value = torch.ones(9)
    copy = HostCopies([tmp_path]).copy(value)
    value.zero_()
    assert torch.equal(loaded(copy), torch.ones(9))
