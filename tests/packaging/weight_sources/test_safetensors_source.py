"""Safetensors files as a source of weights."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from trainload.core.errors import WeightsError
from trainload.packaging.tensors.safetensors_file import DTYPES
from trainload.packaging.weight_sources.safetensors_source import SafetensorsSource

TENSORS = {
    "layer.weight": torch.arange(12.0).reshape(3, 4),
    "layer.bias": torch.arange(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "empty": torch.zeros(0, 5),
}
INDEX = "model.safetensors.index.json"
PARTS = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "weights.safetensors", metadata={"from": "elsewhere"})
    return tmp_path / "weights.safetensors"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder as from Hugging Face: two files and their index."""
    names = sorted(TENSORS)
    folder = tmp_path / "parts"
    folder.mkdir()
    homes = {name: PARTS[number % 2] for number, name in enumerate(names)}
    for part in PARTS:
        save_file({n: TENSORS[n] for n in names if homes[n] == part}, folder / part)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder


def in_memory(folder: Path, name: str) -> str:
    """Return the URL of a copy of a folder in fsspec's memory."""
    fsspec.filesystem("memory").put(f"{folder}/", f"/{name}/", recursive=True)
    return f"memory://{name}"


@pytest.mark.parametrize("where", ["file", "folder", "index", "url", "url of a file"])
def test_every_range_of_a_tensor_is_that_of_the_file(
    where: str, file: Path, parts: Path, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / file.name).write_bytes(file.read_bytes())
    places = {
        "file": str(file),
        "folder": str(tmp_path / "alone"),
        "index": str(parts),
        "url": in_memory(parts, "parts"),
        "url of a file": f"{in_memory(tmp_path / 'alone', 'alone')}/{file.name}",
    }
    source = SafetensorsSource(places[where])
    assert source.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        spec = source.tensors[name]
        assert (spec.dtype, spec.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        flat = tensor.reshape(-1)
        for start in range(len(flat) + 1):
            for stop in range(start, len(flat) + 1):
                assert torch.equal(source.slice(name, start, stop), flat[start:stop])


def test_a_file_in_the_current_folder_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert torch.equal(SafetensorsSource(file.name).slice("count", 0, 1), torch.tensor([7]))


def test_a_range_outside_of_a_tensor_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="not within count"):
        SafetensorsSource(file).slice("count", 0, 2)


def test_a_dtype_that_packages_lack_has_its_own_name(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    assert SafetensorsSource(path).tensors["x"].dtype == "F4"


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="there are no weights"):
        _ = SafetensorsSource(tmp_path).tensors


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"x\.safetensors: a file of weights is missing"):
        _ = SafetensorsSource(tmp_path / "x.safetensors").tensors


def test_two_files_with_one_tensor_are_refused(file: Path) -> None:
    (file.parent / "again.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(WeightsError, match=r"got again\.safetensors and weights\.safetensors"):
        _ = SafetensorsSource(file.parent).tensors


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        (None, "no map"),
        ({"count": "../secret.safetensors"}, "no map"),
        ({"count": 7}, "no map"),
        ({"other": PARTS[0]}, "without other"),
        ({"count": "gone.safetensors"}, "missing"),
    ],
)
def test_an_index_that_is_wrong_is_refused(parts: Path, weight_map: object, problem: str) -> None:
    (parts / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=problem):
        _ = SafetensorsSource(parts).tensors


@given(data=st.data())
def test_a_damaged_header_is_refused_or_reads_no_other_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Every tensor that is described is within the file, and has the bytes of its shape."""
    path = tmp_path_factory.mktemp("damaged") / "w.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.arange(6)}, path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    source = SafetensorsSource(path)
    try:
        tensors = source.tensors
    except WeightsError:
        return
    for name, spec in tensors.items():
        if spec.dtype in DTYPES:
            count = torch.Size(spec.shape).numel()
            assert source.slice(name, 0, count).numel() == count


def changed(path: Path) -> None:
    """Change the last tensor of a file, whose size stays."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_file_that_has_changed_since_it_was_checked_is_refused(parts: Path, place: str) -> None:
    where = str(parts) if place == "folder" else in_memory(parts, "changing")
    known = SafetensorsSource(where).files(set(TENSORS))
    assert torch.equal(
        SafetensorsSource(where, known).slice("count", 0, 1), TENSORS["count"].reshape(1)
    )
    for part in PARTS:
        changed(parts / part)
    if place == "memory":
        in_memory(parts, "changing")
    with pytest.raises(WeightsError, match="has changed since the run was launched"):
        SafetensorsSource(where, known).slice("count", 0, 1)


def test_a_copy_of_a_file_counts_as_the_same(parts: Path, tmp_path: Path) -> None:
    known = SafetensorsSource(parts).files(set(TENSORS))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in parts.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert torch.equal(
        SafetensorsSource(copy, known).slice("count", 0, 1), TENSORS["count"].reshape(1)
    )


def test_only_files_that_are_read_are_recorded(parts: Path) -> None:
    (file,) = SafetensorsSource(parts).files({"count"})
    assert file.name == PARTS[0]
