from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.packaging.jobs import Job
from tests.packaging.tampering import flip, reseal
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from trainload.core.errors import IntegrityError, PackageError
from trainload.packaging.package import Package, open_package
from trainload.packaging.tensors import chunks
from trainload.packaging.tensors.safetensors_file import (
    DTYPES,
    TensorFileWriter,
    TensorSpec,
    read_tensors,
    write_tensors,
)
from trainload.packaging.tensors.weight_shards import shard_layout
from trainload.packaging.write import write_package


def read_tensors_of(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in like.items()
    ]
    return read_tensors(path.read_bytes(), path.name, specs)


def test_every_dtype_reads_back_bit_for_bit_here_and_in_safetensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(
            0,
            2 if name == "bool" else 256,
            (3, 8 * dtype.itemsize),
            generator=generator,
            dtype=torch.uint8,
        ).view(dtype)
        for name, dtype in DTYPES.items()
    }
    tensors |= {
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "strided": torch.arange(6.0).view(2, 3).t(),
    }
    write_tensors(tmp_path / "t.safetensors", tensors)
    theirs = safetensors.torch.load_file(tmp_path / "t.safetensors")
    ours = read_tensors_of(tmp_path / "t.safetensors", tensors)
    for name, tensor in tensors.items():
        for other in (theirs[name], ours[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert torch.equal(
                other.reshape(-1).view(torch.uint8),
                tensor.contiguous().reshape(-1).view(torch.uint8),
            ), name


def test_the_bytes_do_not_depend_on_the_order_in_which_tensors_come(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(3),
        "b": torch.zeros(2, dtype=torch.int64),
        "c": torch.ones(1, dtype=torch.bool),
    }
    write_tensors(tmp_path / "1", tensors)
    write_tensors(tmp_path / "2", dict(reversed(tensors.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("b", torch.ones(3), "has no such tensor"),
        ("a", torch.ones(4), r"wrong dtype or shape.*\(3,\).*\(4,\)"),
        ("a", torch.ones(3, dtype=torch.float64), "wrong dtype or shape.*float32.*float64"),
        ("a", torch.ones(3, device="meta"), "no data"),
    ],
)
def test_a_tensor_that_does_not_belong_is_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    with (
        pytest.raises(PackageError, match=message),
        TensorFileWriter(tmp_path / "t", [TensorSpec("a", "float32", (3,))]) as file,
    ):
        file.add(name, tensor)


def test_a_missing_tensor_and_one_that_comes_twice_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(PackageError, match=r"missing.*a"),
        TensorFileWriter(tmp_path / "t", [TensorSpec("a", "float32", (3,))]),
    ):
        pass
    file = TensorFileWriter(tmp_path / "u", [TensorSpec("a", "float32", (3,))])
    file.add("a", torch.ones(3))
    with pytest.raises(PackageError, match="twice"), file:
        file.add("a", torch.ones(3))


def test_shards_are_filled_in_order_and_hold_at_most_the_limit_or_one_tensor() -> None:
    specs = [TensorSpec(str(i), "float32", (n,)) for i, n in enumerate((5, 5, 20, 1, 1))]
    assert [[s.name for s in shard] for shard in shard_layout(specs, 40).values()] == [
        ["0", "1"],
        ["2"],
        ["3", "4"],
    ]
    assert next(iter(shard_layout(specs, 40))) == "weights/model-00001-of-00003.safetensors"


def test_shards_of_what_changes_come_before_shards_of_what_does_not() -> None:
    specs = [TensorSpec(str(i), "float32", (n,)) for i, n in enumerate((5, 5, 20, 1, 1))]
    layout = shard_layout(specs, 40, {"1", "3", "4"})
    assert [[s.name for s in shard] for shard in layout.values()] == [["1", "3", "4"], ["0"], ["2"]]


def test_the_state_reads_back_as_it_was(job: Job, packaged: Package) -> None:
    state = packaged.program().state
    stored = {n for n in job.program.state if n not in job.program.aliases}
    assert set(state) == stored
    for name in stored:
        assert torch.equal(state[name], job.program.state[name]), name


def test_an_alias_reads_as_its_owner_and_is_stored_once(packaged: Package) -> None:
    assert torch.equal(
        packaged.stored_weights.tensor("head.weight"), packaged.stored_weights.tensor("emb.weight")
    )
    index = json.loads((packaged.path / "weights/model.safetensors.index.json").read_bytes())
    assert "emb.weight" in index["weight_map"] and "head.weight" not in index["weight_map"]


def test_hugging_face_tools_read_the_weights_through_their_index(
    job: Job, packaged: Package
) -> None:
    index = json.loads((packaged.path / "weights/model.safetensors.index.json").read_bytes())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(packaged.path / "weights" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), job.program.state[name])
    assert "mask" not in index["weight_map"]


def test_torchs_own_checkpoint_reader_reads_the_weights(job: Job, packaged: Package) -> None:
    names = json.loads((packaged.path / "weights/model.safetensors.index.json").read_bytes())[
        "weight_map"
    ]
    loaded = {name: torch.empty_like(job.program.state[name]) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that there is no process group
        load(
            loaded,
            storage_reader=HuggingFaceStorageReader(str(packaged.path / "weights")),
            no_dist=True,
        )
    for name, tensor in loaded.items():
        assert torch.equal(tensor, job.program.state[name]), name


@pytest.mark.parametrize(("start", "stop"), [(0, 128), (0, 0), (5, 6), (17, 100), (128, 128)])
def test_a_slice_is_that_range_of_the_flattened_tensor(
    job: Job, packaged: Package, start: int, stop: int
) -> None:
    expected = job.program.state["emb.weight"].reshape(-1)[start:stop]
    assert torch.equal(packaged.stored_weights.slice("emb.weight", start, stop), expected)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 129)])
def test_a_slice_outside_the_tensor_is_refused(packaged: Package, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        packaged.stored_weights.slice("emb.weight", start, stop)


def test_shape_and_dtype_are_known_without_reading(packaged: Package) -> None:
    assert packaged.stored_weights.shape("norm.num_batches_tracked") == ()
    assert packaged.stored_weights.dtype("norm.num_batches_tracked") == torch.int64
    with pytest.raises(KeyError):
        packaged.stored_weights.tensor("nobody")


def test_tensors_that_were_read_can_be_changed_without_changing_the_package(
    packaged: Package,
) -> None:
    packaged.stored_weights.tensor("emb.weight").zero_()
    assert packaged.stored_weights.tensor("emb.weight").abs().sum() > 0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(chunks, "CHUNK", 64)
    return 64


def test_tensors_and_slices_that_span_chunks_are_whole(
    job: Job, tmp_path: Path, small_chunks: int
) -> None:
    package = _written(job, tmp_path / "p.tl")
    flat = job.program.state["emb.weight"].reshape(-1)
    assert torch.equal(package.stored_weights.tensor("emb.weight").reshape(-1), flat)
    for start, stop in ((0, 128), (3, 4), (1, 97), (15, 17), (64, 128)):
        assert torch.equal(
            package.stored_weights.slice("emb.weight", start, stop), flat[start:stop]
        )


def test_a_slice_reads_only_its_own_chunks(job: Job, tmp_path: Path, small_chunks: int) -> None:
    package = _written(job, tmp_path / "p.tl")
    reader = package.stored_weights
    reader.slice("emb.weight", 0, 1)  # reads the header
    path, _ = reader._find("emb.weight")
    place = reader._place(path, "emb.weight")
    flip(package.path / path, place.stop - 1)
    assert reader.slice("emb.weight", 0, 16).shape == (16,)
    with pytest.raises(IntegrityError, match="model-00001"):
        reader.slice("emb.weight", 120, 128)


def test_whole_tensors_in_a_row_are_read_ahead_of_and_slices_never(
    packaged: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = packaged.stored_weights
    reader.check_headers()
    path = reader.file("lin.bias")
    first, second = sorted(
        (name for name in reader.names() if reader.file(name) == path),
        key=lambda n: reader._place(path, n).start,
    )[:2]
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "os.posix_fadvise", lambda _, start, length, __: announced.append((start, length))
    )
    reader.tensor(first)
    reader.tensor(second)
    reader.slice(first, 0, reader.tensor(first).numel())
    reader.slice(second, 0, reader.tensor(second).numel())
    (a, b) = (reader._place(path, name) for name in (first, second))
    sizes = (a.stop - a.start, b.stop - b.start)
    assert announced[:2] == [(a.start, sizes[0]), (b.start, sizes[1] + chunks.SPAN)]
    assert announced[3] == (a.start, sizes[0])
    assert announced[5] == (b.start, sizes[1])


@pytest.mark.parametrize("byte", [0, 300, -1])
def test_a_flipped_bit_in_any_chunk_of_a_large_tensor_is_noticed(
    job: Job, tmp_path: Path, small_chunks: int, byte: int
) -> None:
    package = _written(job, tmp_path / "p.tl")
    path, _ = package.stored_weights._find("emb.weight")
    place = package.stored_weights._place(path, "emb.weight")
    assert (place.stop - place.start) // small_chunks >= 2 * chunks.FEW
    flip(package.path / path, place.start + byte if byte >= 0 else place.stop + byte)
    with pytest.raises(IntegrityError, match="model-00001"):
        open_package(package.path).stored_weights.tensor("emb.weight")


@pytest.mark.parametrize("name", ["emb.weight", "norm.bias", "mask"])
def test_a_flipped_bit_is_noticed_when_the_tensor_is_read(copied: Path, name: str) -> None:
    package = open_package(copied)
    path, _ = package.stored_weights._find(name)
    place = package.stored_weights._place(path, name)
    flip(copied / path, place.start)
    with pytest.raises(IntegrityError, match=path):
        open_package(copied).program().state[name]


@pytest.mark.parametrize(
    "header",
    [
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
        },
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        },
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 24]},
        },
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]},
        },
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": "F32"},
        [],
    ],
    ids=[
        "overlap",
        "hole",
        "before the start",
        "past the end",
        "other dtype",
        "missing",
        "malformed",
        "no object",
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    (tmp_path / "t").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(IntegrityError, match="t"):
        read_tensors_of(tmp_path / "t", {"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.parametrize("length", [2**63, 2**40, 17])
def test_an_impossible_header_length_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "t").write_bytes(length.to_bytes(8, "little") + b"{}      ")
    with pytest.raises(IntegrityError, match="header length"):
        read_tensors_of(tmp_path / "t", {})


def test_an_index_that_names_another_file_is_refused(copied: Path) -> None:
    path = copied / "weights/model.safetensors.index.json"
    path.write_bytes(path.read_bytes().replace(b"model-00001", b"../../x0001", 1))
    reseal(copied)
    with pytest.raises(IntegrityError, match="index"):
        _ = open_package(copied).stored_weights


def _written(job: Job, path: Path) -> Package:
    return write_package(path, job.program, job.updates, job.recipe)
