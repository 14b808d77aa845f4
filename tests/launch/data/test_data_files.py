"""All formats and locations of data give the same rows.

Formats: Parquet, Arrow, npz, safetensors, tar. Locations: files, folders, patterns, URLs.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import trainload
from trainload.capture.program import InputSpec
from trainload.core.errors import DataError, MissingDataError, StorageError
from trainload.launching.data import columns_arrow, columns_parquet
from trainload.launching.data.columns import Sizes
from trainload.launching.data.data_files import find_files
from trainload.launching.data.dataset import check_schema, open_dataset, source_columns

ROWS = 10
X = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3)
CLS = np.arange(ROWS, dtype=np.int64) - 3
INPUTS = [InputSpec("x", "float32", ("batch", 2, "width")), InputSpec("cls", "int64", ("batch",))]
ENDINGS = ("parquet", "arrow", "stream.arrow", "feather", "npz", "safetensors", "tar")


def table(first: int = 0, stop: int = ROWS) -> pa.Table:
    x = X[first:stop]
    lists = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 3), 2
    )
    return pa.table({"x": lists, "cls": CLS[first:stop]})


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def npy(value: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


def write(path: Path, first: int = 0, stop: int = ROWS) -> Path:
    """Write the rows first .. stop - 1 in the format that the file's name indicates."""
    rows = table(first, stop)
    if path.suffix == ".parquet":
        pq.write_table(rows, path, row_group_size=3)
    elif path.name.endswith("stream.arrow"):
        with path.open("wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=3)
    elif path.suffix == ".arrow":
        with path.open("wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=3)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(rows, path, compression="zstd", chunksize=4)
    elif path.suffix == ".npz":
        np.savez(path, x=X[first:stop], cls=CLS[first:stop])
    elif path.suffix == ".safetensors":
        save_file(
            {"x": torch.from_numpy(X[first:stop]), "cls": torch.from_numpy(CLS[first:stop])}, path
        )
    else:
        with tarfile.open(path, "w") as archive:
            for row in range(first, stop):
                add(archive, f"set/{row:04}.x.npy", npy(X[row]))
                add(archive, f"set/{row:04}.cls", str(CLS[row]).encode())
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def memory() -> fsspec.AbstractFileSystem:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    return fs


def demand_rows(source: object, cache: Path) -> None:
    data = open_dataset(source, INPUTS, cache)  # type: ignore[arg-type]
    batch = data.batch(np.arange(ROWS))
    assert data.size == ROWS
    assert np.array_equal(batch["x"].numpy(), X)
    assert np.array_equal(batch["cls"].numpy(), CLS)


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_format_gives_the_rows_that_were_written(
    tmp_path: Path, cache: Path, ending: str
) -> None:
    path = write(tmp_path / f"a.{ending}")
    assert check_schema(path, INPUTS) == ROWS
    demand_rows(path, cache)


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_format_says_its_columns_by_its_first_row(tmp_path: Path, ending: str) -> None:
    assert source_columns(write(tmp_path / f"a.{ending}")) == {
        "x": ("float32", (2, 3)),
        "cls": ("int64", ()),
    }


def test_all_formats_have_one_fingerprint(tmp_path: Path, cache: Path) -> None:
    assert (
        len(
            {
                open_dataset(write(tmp_path / f"a.{ending}"), INPUTS, cache).fingerprint
                for ending in ENDINGS
            }
        )
        == 1
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_format_is_read_at_a_url(
    tmp_path: Path, cache: Path, memory: fsspec.AbstractFileSystem, ending: str
) -> None:
    memory.pipe(f"/set/a.{ending}", write(tmp_path / f"a.{ending}").read_bytes())
    assert check_schema(f"memory://set/a.{ending}", INPUTS) == ROWS
    demand_rows(f"memory://set/a.{ending}", cache)


@pytest.mark.parametrize(
    "source",
    ["memory://set", "memory://set/*.tar", ["memory://set/a.tar", "memory://set/b.tar"], "mixed"],
)
def test_files_at_urls_are_one_data_set(
    tmp_path: Path, cache: Path, memory: fsspec.AbstractFileSystem, source: object
) -> None:
    memory.pipe("/set/a.tar", write(tmp_path / "a.tar", 0, 4).read_bytes())
    memory.pipe("/set/b.tar", write(tmp_path / "b.tar", 4, ROWS).read_bytes())
    memory.pipe("/set/_SUCCESS", b"")
    demand_rows([tmp_path / "a.tar", "memory://set/b.tar"] if source == "mixed" else source, cache)


def test_a_file_at_a_url_that_changes_is_converted_again(
    tmp_path: Path, cache: Path, memory: fsspec.AbstractFileSystem
) -> None:
    memory.pipe("/a.npz", write(tmp_path / "a.npz", 0, 4).read_bytes())
    assert open_dataset("memory://a.npz", INPUTS, cache).size == 4
    memory.pipe("/a.npz", write(tmp_path / "b.npz", 4, ROWS).read_bytes())
    assert open_dataset("memory://a.npz", INPUTS, cache).size == ROWS - 4


def test_a_file_at_a_url_is_read_once(
    tmp_path: Path, cache: Path, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/a.tar", write(tmp_path / "a.tar").read_bytes())
    first = open_dataset("memory://a.tar", INPUTS, cache).fingerprint
    monkeypatch.setattr(type(memory), "open", lambda *_, **__: pytest.fail("it was read again"))
    assert open_dataset("memory://a.tar", INPUTS, cache).fingerprint == first


def test_a_url_where_nothing_is_is_missing_data(memory: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(MissingDataError, match=r"memory://nothing\.parquet: no data was found"):
        check_schema("memory://nothing.parquet", INPUTS)


def test_a_kind_of_url_that_nobody_knows_is_refused() -> None:
    with pytest.raises(StorageError, match="fsspec does not support this URL"):
        check_schema("nowhere://a.parquet", INPUTS)


def test_a_store_that_fails_while_it_is_read_is_a_storage_error(
    tmp_path: Path, cache: Path, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/a.parquet", write(tmp_path / "a.parquet").read_bytes())

    def fail(*_: object) -> bytes:
        raise TimeoutError("the server is gone")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", fail)
    with pytest.raises(
        StorageError, match=r"memory://a\.parquet: the store cannot be reached: the server is gone"
    ):
        open_dataset("memory://a.parquet", INPUTS, cache)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, cache: Path, ending: str) -> None:
    whole = write(tmp_path / f"whole.{ending}").read_bytes()
    path = tmp_path / f"a.{ending}"
    path.write_bytes(whole[: len(whole) * 2 // 5])
    with pytest.raises(DataError):
        open_dataset(path, INPUTS, cache)
    assert not list(cache.rglob("*.npy"))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, cache: Path, ending: str) -> None:
    (tmp_path / f"a.{ending}").write_bytes(b"this is a text and no data at all" * 40)
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset(tmp_path / f"a.{ending}", INPUTS, cache)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b'{"x":{"dtype":"F32","shape":[2,2],"data_offsets":[0,8]}}', "is not where"),
        (b'{"x":{"dtype":"F32","shape":[-2,-2],"data_offsets":[0,16]}}', "is not where"),
        (b'{"x":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]}}', "is not where"),
        (b'{"x":{"dtype":"F99","shape":[2,2],"data_offsets":[0,16]}}', "F99"),
        (b"{", "cannot be read"),
        (b'["x"]', "cannot be read"),
    ],
)
def test_safetensors_headers_that_lie_are_refused(tmp_path: Path, header: bytes, told: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(DataError, match=told):
        check_schema(tmp_path / "a.safetensors", [InputSpec("x", "float32", ("batch", 2))])


def tar(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            add(archive, name, data)
    return path


NUMBER = [InputSpec("n", "int64", ("batch",))]
PAIR = [InputSpec("n", "int64", ("batch", 2))]


@pytest.mark.parametrize(
    ("members", "inputs", "told"),
    [
        (
            [("0.n.cls", b"1"), ("1.m.cls", b"2")],
            NUMBER,
            "a row has different columns than the previous rows",
        ),
        ([("0.n.cls", b"1"), ("0.n.npy", npy(CLS[0]))], NUMBER, "has column 'n' twice"),
        ([("0.n.cls", b"1"), ("1.n.cls", b"two")], NUMBER, "1.n.cls: a member cannot be read"),
        ([("0.n.cls", str(2**63).encode())], NUMBER, "a member cannot be read"),
        ([("0.n.npy", npy(np.arange(2))), ("1.n.npy", npy(np.arange(3)))], PAIR, "length 3"),
        (
            [("0.n.npy", npy(np.arange(2))), ("1.n.npy", npy(np.arange(2.0)))],
            PAIR,
            "1.n.npy: input 'n' has the wrong dtype",
        ),
        ([("0.n.npy", npy(np.array([None])))], NUMBER, "cannot be read"),
        ([("0.n.jpg", b"1")], [InputSpec("n.jpg", "uint8", ("batch",))], "got bytes of .n.jpg"),
        ([("0.n.cls", b"1"), ("0.txt", b"a")], NUMBER, "not inputs of the package: 'txt'"),
    ],
)
def test_rows_of_a_tar_file_that_do_not_fit_are_refused(
    tmp_path: Path,
    cache: Path,
    members: list[tuple[str, bytes]],
    inputs: list[InputSpec],
    told: str,
) -> None:
    with pytest.raises(DataError, match=told):
        open_dataset(tar(tmp_path / "a.tar", *members), inputs, cache)


def test_an_empty_tar_file_beside_others_has_no_rows(tmp_path: Path, cache: Path) -> None:
    demand_rows([tar(tmp_path / "0.tar"), write(tmp_path / "a.tar")], cache)


def tensors(kind: str) -> pa.Array:
    if kind == "arrow":
        return pa.FixedShapeTensorArray.from_numpy_ndarray(X)
    ray = pytest.importorskip("ray.data.extensions")
    return ray.ArrowTensorArray.from_numpy(X)


@pytest.mark.parametrize("kind", ["arrow", "ray"])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_of_tensors_have_their_shape(
    tmp_path: Path, cache: Path, kind: str, ending: str
) -> None:
    rows = pa.table({"x": tensors(kind), "cls": CLS})
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(rows, path)
    else:
        with pa.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(rows)
    assert source_columns(path)["x"] == ("float32", (2, 3))
    demand_rows(path, cache)


def test_rays_tensors_have_their_shape_where_ray_is_not_loaded(tmp_path: Path, cache: Path) -> None:
    storage = pa.array(X.reshape(ROWS, 6).tolist(), pa.large_list(pa.float32()))
    about = {
        "ARROW:extension:name": "ray.data.arrow_tensor_v3",
        "ARROW:extension:metadata": "[2, 3]",
    }
    known = about | {"ARROW:extension:name": "ray.data.arrow_tensor_v2"}
    for name, metadata in (("known", known), ("unknown", about)):
        schema = pa.schema(
            [pa.field("x", storage.type, metadata=metadata), pa.field("cls", pa.int64())]
        )
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", schema) as writer:
            writer.write_table(pa.table({"x": storage, "cls": CLS}).cast(schema))
    demand_rows(tmp_path / "known.arrow", cache)
    with pytest.raises(DataError, match="wrong number of dims"):
        open_dataset(tmp_path / "unknown.arrow", INPUTS, cache)


RUNS = pa.compute.run_end_encode(pa.array([7, 7, 7, 7, 9, 9]))
ENCODED: dict[str, tuple[pa.Array, list[Any]]] = {
    "views of lists": (
        pa.ListViewArray.from_arrays(
            pa.array([2, 0], pa.int32()), pa.array([2, 2], pa.int32()), pa.array([1, 2, 3, 4])
        ),
        [[3, 4], [1, 2]],
    ),
    "runs": (RUNS, [7, 7, 7, 7, 9, 9]),
    "lists of runs": (
        pa.ListArray.from_arrays(pa.array([0, 3, 6], pa.int32()), RUNS),
        [[7, 7, 7], [7, 9, 9]],
    ),
    "places in a dictionary": (pa.array([5, 6, 5]).dictionary_encode(), [5, 6, 5]),
}


@pytest.mark.parametrize(
    ("kind", "ending"),
    [*((kind, "arrow") for kind in ENCODED), ("places in a dictionary", "parquet")],
)
def test_values_are_read_however_arrow_encodes_them(
    tmp_path: Path, cache: Path, kind: str, ending: str
) -> None:
    column, expected = ENCODED[kind]
    path, rows = tmp_path / f"a.{ending}", pa.table({"x": column})
    if ending == "arrow":
        with path.open("wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
    else:
        pq.write_table(rows, path)
    shape = np.asarray(expected).shape
    data = open_dataset(path, [InputSpec("x", "int64", ("batch", *shape[1:]))], cache)
    assert data.batch(np.arange(len(expected)))["x"].tolist() == expected


@pytest.mark.parametrize("kind", ["parquet", "runs"])
def test_a_file_that_takes_next_to_nothing_is_read_a_block_at_a_time(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, width = 4000, 256
    ones = np.ones(rows * width, np.int64)
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(
            pa.table({"mask": pa.FixedSizeListArray.from_arrays(pa.array(ones), width)}), path
        )
    else:
        path = tmp_path / "a.arrow"
        table = pa.table({"mask": pa.compute.run_end_encode(pa.array(ones))})
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert path.stat().st_size < ones.nbytes / 100
    reader, most = (columns_parquet, 1 << 20) if kind == "parquet" else (columns_arrow, 1 << 20)
    monkeypatch.setattr(reader, "BLOCK_BYTES", most)
    spec = InputSpec("mask", "int64", ("batch", width) if kind == "parquet" else ("batch",))
    (file_,) = find_files(path, (path.suffix,))
    blocks = list(reader.read_blocks(file_, [spec], Sizes([spec])))
    assert max(block["mask"].nbytes for block in blocks) <= most
    assert sum(len(block["mask"]) for block in blocks) == (
        rows if kind == "parquet" else rows * width
    )


def test_tensors_in_another_order_of_dims_are_refused(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=[1, 0])
    rows = pa.table(
        {
            "x": pa.ExtensionArray.from_storage(
                kind, pa.array(X.reshape(ROWS, 6).tolist(), kind.storage_type)
            ),
            "cls": CLS,
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="wrong dtype"):
        check_schema(tmp_path / "a.parquet", INPUTS)


# Rows in memory


def test_rows_in_memory_are_written_as_they_are(tmp_path: Path, cache: Path) -> None:
    batches = [
        {"x": X[:3], "cls": CLS[:3]},
        {"x": torch.from_numpy(X[3:4]), "cls": [int(CLS[3])]},
        {"x": X[4:], "cls": CLS[4:]},
    ]
    assert trainload.write_rows(batches, tmp_path / "a.arrow") == ROWS
    demand_rows(tmp_path / "a.arrow", cache)


def test_arrows_tables_are_written_as_they_are(tmp_path: Path, cache: Path) -> None:
    assert (
        trainload.write_rows([table(0, 4), *table(4, ROWS).to_batches()], tmp_path / "a.arrow")
        == ROWS
    )
    demand_rows(tmp_path / "a.arrow", cache)


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([], "there are no rows"),
        ([{"x": X}, {"x": X[:, :1]}], "batch 1: a batch has different columns than the first"),
        ([{"x": X}, {"y": X}], "batch 1: a batch has different columns than the first"),
        (
            [{"x": X}, {"x": X.astype(np.float64)}],
            "batch 1: a batch has different columns than the first",
        ),
        ([{"x": X, "cls": CLS[:3]}], "different numbers of rows"),
        ([{"x": [[1, 2], [3]]}], "batch 0, column 'x': a column is not an array"),
        ([{"x": torch.zeros(2, dtype=torch.bfloat16)}], "a column is not an array"),
        ([{"x": np.zeros(2, dtype=np.complex64)}], "dtype that data files do not support"),
        ([{"x": np.array(["a", "b"])}], "dtype that data files do not support"),
        ([{"x": np.float32(1)}], "a column has no values"),
        ([X], "this is not a batch of rows"),
    ],
)
def test_rows_that_no_file_can_hold_are_refused_and_nothing_is_left(
    tmp_path: Path, batches: list[object], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        trainload.write_rows(batches, tmp_path / "a.arrow")
    assert not list(tmp_path.iterdir())


def test_rows_that_cannot_be_written_leave_the_file_that_was_there(tmp_path: Path) -> None:
    trainload.write_rows([{"x": X}], tmp_path / "a.arrow")
    before = (tmp_path / "a.arrow").read_bytes()
    with pytest.raises(DataError):
        trainload.write_rows([{"x": X}, {"y": X}], tmp_path / "a.arrow")
    assert (tmp_path / "a.arrow").read_bytes() == before
    with pytest.raises(StorageError, match="cannot be written"):
        trainload.write_rows([{"x": X}], tmp_path / "nowhere" / "a.arrow")


@pytest.mark.parametrize("source", ["set", "set/*", "set/*.parquet", "set/**", "set/**/*.parquet"])
@pytest.mark.parametrize("place", ["here", "at a URL"])
def test_a_folder_with_the_name_of_a_data_file_stands_for_the_files_in_it(
    tmp_path: Path, cache: Path, memory: fsspec.AbstractFileSystem, source: str, place: str
) -> None:
    for name, first, stop in (
        ("a.parquet", 0, 4),
        ("b.parquet/part-0.parquet", 4, 7),
        ("b.parquet/part-1.parquet", 7, ROWS),
    ):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        memory.pipe(f"/set/{name}", write(path, first, stop).read_bytes())
    (tmp_path / "set" / "b.parquet" / "_SUCCESS").touch()
    memory.pipe("/set/b.parquet/_SUCCESS", b"")
    if source != "set/**":  # `set/**` also matches the marker file
        demand_rows(str(tmp_path / source) if place == "here" else f"memory://{source}", cache)
    names = [
        file.name
        for file in find_files(
            str(tmp_path / source) if place == "here" else f"memory://{source}", [".parquet"]
        )
    ]
    assert [name.partition("set/")[2] for name in names if not name.endswith("_SUCCESS")] == [
        "a.parquet",
        "b.parquet/part-0.parquet",
        "b.parquet/part-1.parquet",
    ]


def test_a_cold_file_has_one_identity_whoever_asks_at_the_same_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz")
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    (file,) = find_files(path, (".npz",))
    found: list[str | BaseException] = []
    barrier = threading.Barrier(8)

    def ask(number: int) -> None:
        barrier.wait()
        try:
            found.extend(file.identity(tmp_path / f"cache-{place}") for place in range(100))
        except BaseException as error:  # noqa: BLE001  # the test reports it
            found.append(error)

    for place in range(100):
        (tmp_path / f"cache-{place}").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        # store the identity of a file however recently it was modified
        patch.setattr("trainload.launching.data.data_files._SETTLED_NS", -(10**12))
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 800 and set(found) == {expected}


@pytest.mark.parametrize("source", ["set", "set/*.parquet"])
def test_a_link_to_nothing_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "a.parquet")
    (tmp_path / "set" / "b.parquet").symlink_to("gone.parquet")
    with pytest.raises(
        MissingDataError,
        match=r"set/b\.parquet: a file of the data does not exist \(got a link to gone\.parquet\)",
    ):
        find_files(tmp_path / source, [".parquet"])
