"""Checkpoints of torch.distributed.checkpoint as a source of weights."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks import on_ranks
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainload.core.errors import WeightsError
from trainload.packaging.tensors.safetensors_file import DTYPES
from trainload.packaging.weight_sources.dcp_source import DcpSource

TENSORS: dict[str, torch.Tensor] = {
    "rows": torch.arange(35.0).reshape(7, 5),
    "columns": torch.arange(30).reshape(5, 6),
    "inner": torch.arange(48, dtype=torch.bfloat16).reshape(2, 6, 4),
    "both": torch.arange(24.0).reshape(4, 6),
    "whole": torch.arange(4, dtype=torch.float16),
    "number": torch.tensor(3),
    "turned": torch.arange(12.0).reshape(3, 4).T,
}
PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Shard(0), Replicate()],
    "columns": [Replicate(), Shard(1)],
    "inner": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
}


def save_shards(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        name: distribute_tensor(tensor, mesh, PLACEMENTS[name]) if name in PLACEMENTS else tensor
        for name, tensor in TENSORS.items()
    }
    save({"model": state, "step": 7}, checkpoint_id=folder / "saved")
    dist.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks, whose tensors are divided in all ways."""
    folder = tmp_path_factory.mktemp("dcp")
    on_ranks(4, save_shards, folder)
    return folder / "saved"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process


@pytest.mark.parametrize("name", TENSORS)
def test_every_range_of_a_tensor_is_that_of_the_checkpoint(name: str, saved: Path) -> None:
    source = DcpSource(saved)
    spec, tensor = source.tensors[f"model.{name}"], TENSORS[name]
    assert (spec.dtype, spec.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
    flat = tensor.reshape(-1)
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 1):
            assert torch.equal(source.slice(f"model.{name}", start, stop), flat[start:stop])


def test_only_tensors_are_there(saved: Path) -> None:
    assert set(DcpSource(saved).tensors) == {f"model.{name}" for name in TENSORS}


def test_a_checkpoint_at_a_url_is_read(saved: Path) -> None:
    fsspec.filesystem("memory").put(f"{saved}/", "/dcp/", recursive=True)
    found = DcpSource("memory://dcp").slice("model.both", 3, 20)
    assert torch.equal(found, TENSORS["both"].reshape(-1)[3:20])


def test_another_checkpoint_in_its_place_is_refused(saved: Path, tmp_path: Path) -> None:
    known = DcpSource(saved).files(set())
    save({"model": TENSORS}, checkpoint_id=tmp_path / "other")
    with pytest.raises(WeightsError, match="has changed since the run was launched"):
        DcpSource(tmp_path / "other", known).slice("model.rows", 0, 1)


def test_a_shard_that_has_changed_is_refused(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in saved.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    known = DcpSource(copy).files({"model.rows"})
    assert len(DcpSource(copy, known).slice("model.rows", 0, 35)) == 35
    shards = [file.name for file in known if file.name != ".metadata"]
    for name in shards:
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
    with pytest.raises(WeightsError, match=r"\.distcp: a file of weights has changed"):
        DcpSource(copy, known).slice("model.rows", 0, 35)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool], ids=str
)
def test_other_dtypes_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    save({"x": tensor}, checkpoint_id=tmp_path / "saved")
    source = DcpSource(tmp_path / "saved")
    assert torch.equal(source.slice("x", 1, 5), tensor.reshape(-1)[1:5])


def test_a_conjugated_tensor_is_refused(tmp_path: Path) -> None:
    save({"x": torch.tensor([1 + 2j]).conj()}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(WeightsError, match="conjugated"):
        DcpSource(tmp_path / "saved").slice("x", 0, 1)


class Planted:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch planted",)


def test_nothing_in_a_pickle_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(WeightsError, match="cannot be read"):
        _ = DcpSource(tmp_path).tensors
    assert not (tmp_path / "planted").exists()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "saved"
    save({"a": torch.arange(4.0), "b": torch.arange(6)}, checkpoint_id=folder)
    return folder


@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_has_tensors_of_its_shapes(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    for path in small.iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        (folder / path.name).write_bytes(content[: data.draw(st.integers(0, len(content)))])
    source = DcpSource(folder)
    try:
        for name, spec in source.tensors.items():
            count = torch.Size(spec.shape).numel()
            if count < 100 and spec.dtype in DTYPES:
                assert len(source.slice(name, 0, count)) == count
    except WeightsError:
        return


def test_a_file_that_is_missing_is_told(saved: Path, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes((saved / ".metadata").read_bytes())
    with pytest.raises(WeightsError, match=r"__\d_\d\.distcp: a file is missing"):
        DcpSource(tmp_path).slice("model.rows", 0, 1)
