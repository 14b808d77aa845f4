"""Data files -> batches: values are read unchanged; mismatches are rejected with their place."""

from __future__ import annotations

import os
import resource
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests import ranks

from trainload.capture.program import InputSpec
from trainload.core.canonical_json import sha256_file
from trainload.core.errors import DataError, StorageError
from trainload.launching.data import columns_cache
from trainload.launching.data import data_files as files
from trainload.launching.data.data_files import LocalFile, Source
from trainload.launching.data.dataset import check_schema, open_dataset

TOKENS = InputSpec("tokens", "uint8", ("batch", 4))
GROUP = 1000


def fixed(values: np.ndarray) -> pa.Array:
    """Return (n, *dims) values as fixed-size lists, nested for more than one dim."""
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for length in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def write(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=GROUP)
    return path


def tokens(rows: int, start: int = 0) -> np.ndarray:
    return ((np.arange(rows * 4).reshape(rows, 4) + start) % 251).astype(np.uint8)


def made_in(cache: Path) -> list[Path]:
    """Return the files of converted columns in the cache, complete or not.

    The stored digests of source files are not included.
    """
    return [path for path in cache.rglob("*") if path.suffix in (".npy", ".json", ".part")]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "name",
    [
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_each_dtype_comes_back_bit_for_bit(
    tmp_path: Path, cache: Path, name: str, kind: str
) -> None:
    values = np.arange(-6, 18).reshape(12, 2).astype(name)  # if unsigned: the greatest values too
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        write(path, x=fixed(values))
    else:
        np.savez(path, x=values)
    batch = open_dataset(path, [InputSpec("x", name, ("batch", 2))], cache).batch(
        np.array([3, 0, 11])
    )
    assert batch["x"].dtype == getattr(torch, name)
    assert np.array_equal(batch["x"].numpy(), values[[3, 0, 11]])


@pytest.mark.parametrize(
    "kind", ["scalar", "list", "large_list", "fixed", "nested list", "nested fixed", "mixed"]
)
def test_each_parquet_form_gives_its_shape(tmp_path: Path, cache: Path, kind: str) -> None:
    values = np.arange(5 * 2 * 3, dtype=np.int32).reshape(5, 2, 3)
    forms = {
        "scalar": (pa.array(values[:, 0, 0]), values[:, 0, 0]),
        "list": (pa.array(values[:, 0].tolist(), pa.list_(pa.int32())), values[:, 0]),
        "large_list": (pa.array(values[:, 0].tolist(), pa.large_list(pa.int32())), values[:, 0]),
        "fixed": (fixed(values[:, 0]), values[:, 0]),
        "nested list": (pa.array(values.tolist(), pa.list_(pa.list_(pa.int32()))), values),
        "nested fixed": (fixed(values), values),
        "mixed": (pa.array(values.tolist(), pa.large_list(pa.list_(pa.int32(), 3))), values),
    }
    column, wanted = forms[kind]
    spec = InputSpec(
        "x", "int32", ("batch", "rows", 3)[: wanted.ndim] if wanted.ndim != 2 else ("batch", 3)
    )
    found = open_dataset(write(tmp_path / "a.parquet", x=column), [spec], cache).batch(
        np.arange(5)
    )["x"]
    assert np.array_equal(found.numpy(), wanted)


def test_many_row_groups_come_back_in_order(tmp_path: Path, cache: Path) -> None:
    data = open_dataset(write(tmp_path / "a.parquet", tokens=fixed(tokens(3500))), [TOKENS], cache)
    assert data.size == 3500
    assert np.array_equal(data.batch(np.arange(3500))["tokens"].numpy(), tokens(3500))


@pytest.mark.parametrize("spelling", ["folder", "glob", "sequence"])
@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_several_files_are_one_data_set_in_sorted_order(
    tmp_path: Path, cache: Path, spelling: str, kind: str
) -> None:
    for name, start in (("b", 100), ("a", 0), ("c", 200)):
        if kind == "npz":
            np.savez(tmp_path / f"{name}.npz", tokens=tokens(7, start))
        else:
            write(tmp_path / f"{name}.parquet", tokens=fixed(tokens(7, start)))
    (tmp_path / "_SUCCESS").touch()
    sources: dict[str, Source] = {
        "folder": tmp_path,
        "glob": f"{tmp_path}/*.{kind}",
        "sequence": [tmp_path / f"{name}.{kind}" for name in "abc"],
    }
    data = open_dataset(sources[spelling], [TOKENS], cache)
    wanted = np.concatenate([tokens(7), tokens(7, 100), tokens(7, 200)])
    assert np.array_equal(data.batch(np.arange(21))["tokens"].numpy(), wanted)


def test_an_npz_in_fortran_order_comes_back_right(tmp_path: Path, cache: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", tokens=np.asfortranarray(tokens(9)))
    assert np.array_equal(
        open_dataset(tmp_path / "a.npz", [TOKENS], cache).batch(np.arange(9))["tokens"].numpy(),
        tokens(9),
    )


def test_the_fingerprint_is_of_the_rows_and_not_of_the_files(tmp_path: Path, cache: Path) -> None:
    whole = write(tmp_path / "whole.parquet", tokens=fixed(tokens(8)))
    np.savez(tmp_path / "whole.npz", tokens=tokens(8))
    changed = tokens(8)
    changed[5, 1] ^= 1
    other = write(tmp_path / "other.parquet", tokens=fixed(changed))
    prints = [
        open_dataset(path, [TOKENS], cache).fingerprint
        for path in (whole, tmp_path / "whole.npz", other)
    ]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


def test_a_file_that_changes_is_converted_again(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.parquet", tokens=fixed(tokens(8)))
    open_dataset(path, [TOKENS], cache)
    write(path, tokens=fixed(tokens(8, 50)))
    assert np.array_equal(
        open_dataset(path, [TOKENS], cache).batch(np.arange(8))["tokens"].numpy(), tokens(8, 50)
    )


def test_a_sources_digest_is_remembered_until_it_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(files, "sha256_file", counted)
    monkeypatch.setattr(files, "_SETTLED_NS", 0)
    path = write(tmp_path / "a.parquet", tokens=fixed(tokens(8)))
    time.sleep(0.02)
    prints = [open_dataset(path, [TOKENS], cache).fingerprint for _ in range(3)]
    assert (len(read), len(set(prints))) == (1, 1)
    write(path, tokens=fixed(tokens(8, 50)))
    assert open_dataset(path, [TOKENS], cache).fingerprint != prints[0]
    assert len(read) == 2


def test_a_batch_owns_its_memory(tmp_path: Path, cache: Path) -> None:
    data = open_dataset(write(tmp_path / "a.parquet", tokens=fixed(tokens(8))), [TOKENS], cache)
    data.batch(np.arange(8))["tokens"].zero_()
    assert np.array_equal(data.batch(np.arange(8))["tokens"].numpy(), tokens(8))


@pytest.mark.parametrize("row", [-1, 8])
def test_a_row_that_is_not_there_is_refused(tmp_path: Path, cache: Path, row: int) -> None:
    data = open_dataset(write(tmp_path / "a.parquet", tokens=fixed(tokens(8))), [TOKENS], cache)
    with pytest.raises(IndexError):
        data.batch(np.array([row]))


ragged = pa.array([[1, 2, 3, 4]] * 1500 + [[1, 2, 3]] + [[1, 2, 3, 4]] * 9, pa.list_(pa.uint8()))
deep = pa.array([[[1, 2], [3, 4]]] * 3 + [[[1, 2], [3]]], pa.list_(pa.list_(pa.uint8())))
BAD_COLUMNS = {
    "missing": ({"text": fixed(tokens(3))}, TOKENS, ["'tokens'", "got text"]),
    "extra": (
        {"tokens": fixed(tokens(3)), "id": pa.array([1, 2, 3])},
        TOKENS,
        ["'id'", "only these columns: tokens"],
    ),
    "dtype": (
        {"tokens": fixed(tokens(3).astype(np.int64))},
        TOKENS,
        ["'tokens'", "expected uint8, got int64"],
    ),
    "text": ({"tokens": pa.array(["a"])}, TOKENS, ["expected uint8, got string"]),
    "dims": (
        {"tokens": pa.array(np.zeros(3, np.uint8))},
        TOKENS,
        ["rows of 1 dims", "got rows of 0 dims"],
    ),
    "length": (
        {"tokens": fixed(tokens(3)[:, :3])},
        TOKENS,
        ["expected length 4 in dim 1, got length 3"],
    ),
    "ragged": (
        {"tokens": ragged},
        TOKENS,
        ["row 1500", "expected length 4 in dim 1, got length 3"],
    ),
    "ragged symbol": (
        {"tokens": ragged},
        InputSpec("tokens", "uint8", ("batch", "s1")),
        ["row 1500", "length 4 in dim 1 (s1"],
    ),
    "ragged inside": (
        {"tokens": deep},
        InputSpec("tokens", "uint8", ("batch", 2, "s1")),
        ["row 3", "length 2 in dim 2"],
    ),
    "null list": (
        {"tokens": pa.array([[1, 2, 3, 4], None], pa.list_(pa.uint8()))},
        TOKENS,
        ["nulls", "row 1"],
    ),
    "null value": (
        {"tokens": pa.array([[1, 2, 3, 4], [1, 2, None, 4]], pa.list_(pa.uint8(), 4))},
        TOKENS,
        ["nulls", "row 1"],
    ),
    "empty": ({"tokens": fixed(tokens(0))}, TOKENS, ["empty", "at least one row"]),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, cache: Path, case: str) -> None:
    columns, spec, words = BAD_COLUMNS[case]
    path = write(tmp_path / "a.parquet", **columns)
    with pytest.raises(DataError) as caught:
        open_dataset(path, [spec], cache)
    for word in [*words, str(path)]:
        assert word in str(caught.value)
    assert made_in(cache) == []


@pytest.mark.parametrize("case", ["missing", "extra", "dtype", "text", "dims", "length", "empty"])
def test_the_schema_check_needs_no_values(tmp_path: Path, case: str) -> None:
    columns, spec, words = BAD_COLUMNS[case]
    with pytest.raises(DataError) as caught:
        check_schema(write(tmp_path / "a.parquet", **columns), [spec])
    assert all(word in str(caught.value) for word in words)


def test_the_schema_check_counts_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", tokens=fixed(tokens(8)))
    write(tmp_path / "b.parquet", tokens=fixed(tokens(5)))
    assert check_schema(tmp_path, [TOKENS]) == 13


def test_a_symbol_has_one_length_in_all_inputs(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.parquet", x=fixed(tokens(3)), y=fixed(tokens(3)[:, :2]))
    specs = [InputSpec("x", "uint8", ("batch", "s1")), InputSpec("y", "uint8", ("batch", "s1"))]
    with pytest.raises(DataError, match=r"input 'y'.*expected length 4 in dim 1"):
        open_dataset(path, specs, cache)


def test_a_symbol_has_one_length_in_all_files(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "a.parquet", x=fixed(tokens(3)))
    write(tmp_path / "b.parquet", x=fixed(tokens(3)[:, :2]))
    with pytest.raises(DataError, match=r"b\.parquet.*expected length 4 in dim 1"):
        open_dataset(tmp_path, [InputSpec("x", "uint8", ("batch", "s1"))], cache)


@pytest.mark.parametrize("source", ["none.parquet", "none-*.parquet", "empty-folder"])
def test_no_file_is_refused(tmp_path: Path, cache: Path, source: str) -> None:
    (tmp_path / "empty-folder").mkdir()
    with pytest.raises(DataError, match=f"{source.replace('*', '.')}: no data was found"):
        open_dataset(str(tmp_path / source), [TOKENS], cache)


@pytest.mark.parametrize("name", ["a.parquet", "a.npz"])
@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_an_unreadable_file_is_refused(tmp_path: Path, cache: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    if name == "a.npz":
        np.savez(path, tokens=tokens(2000))
    else:
        write(path, tokens=fixed(tokens(2000)))
    whole = path.read_bytes()
    path.write_bytes(
        {"text": b"no such thing", "cut": whole[: len(whole) // 2], "empty": b""}[damage]
    )
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset(path, [TOKENS], cache)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"[]", b'"x"', b'{"tokens":3}'])
def test_a_safetensors_file_whose_header_is_no_object_of_tensors_is_refused(
    tmp_path: Path, cache: Path, header: bytes
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset(path, [TOKENS], cache)


def test_a_changed_byte_in_an_npz_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, tokens=tokens(2000))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)
    with pytest.raises(DataError, match="cannot be read"):
        open_dataset(path, [TOKENS], cache)


def test_npz_arrays_of_different_lengths_are_refused(tmp_path: Path, cache: Path) -> None:
    np.savez(tmp_path / "a.npz", x=tokens(3), y=tokens(4))
    specs = [InputSpec("x", "uint8", ("batch", 4)), InputSpec("y", "uint8", ("batch", 4))]
    with pytest.raises(DataError, match="x: 3, y: 4"):
        open_dataset(tmp_path / "a.npz", specs, cache)


def test_pickled_objects_in_an_npz_are_refused(tmp_path: Path, cache: Path) -> None:
    np.savez(tmp_path / "a.npz", tokens=np.array([{1: 2}] * 4, dtype=object))
    with pytest.raises(DataError, match="expected uint8, got object"):
        open_dataset(tmp_path / "a.npz", [TOKENS], cache)


@pytest.mark.parametrize("order", [False, True], ids=["C", "Fortran"])
def test_either_byte_order_is_read(tmp_path: Path, cache: Path, order: bool) -> None:
    values = np.arange(12, dtype=">i4").reshape(4, 3)
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(values) if order else values)
    data = open_dataset(tmp_path / "a.npz", [InputSpec("x", "int32", ("batch", 3))], cache)
    assert data.batch(np.arange(4))["x"].tolist() == values.tolist()


def test_files_of_two_kinds_are_refused(tmp_path: Path, cache: Path) -> None:
    np.savez(tmp_path / "a.npz", tokens=tokens(3))
    write(tmp_path / "b.parquet", tokens=fixed(tokens(3)))
    with pytest.raises(DataError, match="must have the same format"):
        open_dataset(tmp_path, [TOKENS], cache)


def test_bfloat16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got bfloat16"):
        check_schema(tmp_path, [InputSpec("x", "bfloat16", ("batch",))])


def test_a_conversion_that_fails_leaves_no_draft(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.parquet", tokens=fixed(tokens(8)))
    with pytest.raises(DataError, match="changed while it was being read"):
        columns_cache.make_cached(
            cache, [LocalFile(path)], [TOKENS], lambda: (8, [{"tokens": tokens(7)}])
        )
    assert made_in(cache) == []


def test_a_cache_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", tokens=fixed(tokens(8)))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="another cache folder"):
        open_dataset(path, [TOKENS], tmp_path / "file" / "cache")


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.parquet", tokens=fixed(tokens(100_000)))
    _, told = ranks.ran(open_on_a_full_disk, path, cache, cwd=tmp_path, seconds=100)
    assert "StorageError" in told
    assert made_in(cache) == []


def open_on_a_full_disk(path: Path, cache: Path) -> None:
    """Open a data set with limited file sizes, which stand in for a full disk.

    The write fails in the same place.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    open_dataset(path, [TOKENS], cache)


def test_several_processes_convert_once(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.parquet", tokens=fixed(tokens(50_000)))
    told = [tmp_path / f"{number}.out" for number in range(3)]
    running = [
        ranks.start(open_counted, path, cache, cwd=tmp_path, log=log, variables=os.environ)
        for log in told
    ]
    for process in running:
        process.join(100)
    ranks.end(running)
    words = [word for log in told for word in log.read_text().split()]
    assert words.count("converted") == 1
    assert len(words) == 4
    assert len(set(words)) == 2


def open_counted(path: Path, cache: Path) -> None:
    """Open a data set, and print its fingerprint.

    Print "converted" before if this process converted the data.
    """
    made = columns_cache._convert

    def counted(*arguments: Any, **named: Any) -> None:
        print("converted")
        made(*arguments, **named)

    columns_cache._convert = counted
    print(open_dataset(path, [TOKENS], cache).fingerprint)


def test_no_python_value_is_made_of_a_token(tmp_path: Path, cache: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (100_000, 129), dtype=np.uint8)
    pq.write_table(pa.table({"tokens": fixed(values)}), tmp_path / "a.parquet")
    tracemalloc.start()
    data = open_dataset(
        tmp_path / "a.parquet", [InputSpec("tokens", "uint8", ("batch", 129))], cache
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = np.random.default_rng(1).integers(0, 100_000, 32)
    assert np.array_equal(data.batch(rows)["tokens"].numpy(), values[rows])
    assert peak < 4 * values.size  # a Python list would take 8 bytes per token
