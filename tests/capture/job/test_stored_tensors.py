"""Tensors that are kept for a comparison, in memory or in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainload.capture.job import stored_tensors
from trainload.capture.job.stored_tensors import StoredTensors
from trainload.core.errors import StorageError

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool)
TENSORS = {
    **{str(dtype): (torch.arange(6) % 3).reshape(2, 3).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(3, 5).T,
}


@pytest.fixture(params=[0, 2**20], ids=["file", "memory"])
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StoredTensors:
    """Return a store that keeps nothing, or everything, in memory."""
    monkeypatch.setattr(stored_tensors, "_IN_MEMORY", request.param or 1)
    kept = StoredTensors()
    kept.update(TENSORS)
    return kept


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_as_it_was_stored(stored: StoredTensors, name: str) -> None:
    assert stored.is_equal(name, TENSORS[name])
    read = stored[name]
    assert read is not None
    assert (read.shape, read.dtype) == (TENSORS[name].shape, TENSORS[name].dtype)


def test_a_tensor_is_replaced_by_a_larger_one(stored: StoredTensors) -> None:
    stored["scalar"] = torch.ones(7)
    assert stored.is_equal("scalar", torch.ones(7))
    assert all(stored.is_equal(n, tensor) for n, tensor in TENSORS.items() if n != "scalar")


def test_sums_are_those_of_the_tensors(stored: StoredTensors) -> None:
    parts = [torch.randn(9) for _ in range(3)]
    for part in parts:
        stored.add("sum", part)
    assert stored.is_equal("sum", parts[0] + parts[1] + parts[2])


def test_a_name_without_a_tensor_is_missing(stored: StoredTensors) -> None:
    stored["none"] = None
    assert (stored["none"], stored.missing()) == (None, {"none"})


def test_equality_is_that_of_bits() -> None:
    kept = StoredTensors()
    kept["nan"] = torch.tensor([float("nan"), 0.0])
    assert kept.is_equal("nan", torch.tensor([float("nan"), 0.0]))
    assert not kept.is_equal("nan", torch.tensor([float("nan"), -0.0]))


def test_values_are_restored(stored: StoredTensors) -> None:
    changed: Tensor = torch.zeros(5, 3)
    stored.restore("transposed", changed)
    assert torch.equal(changed, TENSORS["transposed"])


def test_a_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "_IN_MEMORY", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StorageError, match="TMPDIR"):
        StoredTensors()["x"] = torch.ones(2)
