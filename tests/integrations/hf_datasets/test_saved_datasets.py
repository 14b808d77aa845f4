"""Folders of `datasets.save_to_disk` are data sets: made by the real library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.launch.tiny import tiny_job, token_rows
from tests.laws.runs import curve

import trainload
from trainload.core.errors import DataError, MissingDataError
from trainload.launching.data import columns_cache
from trainload.launching.data.dataset import open_dataset, source_columns
from trainload.packaging.format.entries import data_specs
from trainload.packaging.package import Package

datasets = pytest.importorskip("datasets", reason="datasets is not installed: make integrations")
datasets.disable_progress_bars()

ROWS = 40


def dataset(rows: int = ROWS, seed: int = 1) -> Any:
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint8"))})
    return datasets.Dataset.from_dict({"tokens": list(token_rows(rows, seed))}, features=features)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(tiny_job(), tmp_path_factory.mktemp("tiny") / "tiny.tl")


def opened(source: Path, package: Package, cache: Path) -> Any:
    return open_dataset(source, data_specs(package.manifest, ""), cache)


def losses(package: Package, data: Path, run_dir: Path) -> list[float]:
    plan = trainload.plan(package, trainload.Cluster(), "single")
    trainload.launch(package, plan, data, run_dir=run_dir, backend="local", compile=False, steps=12)
    return curve(run_dir)


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if rows are converted into the cache."""

    def convert(*_: object) -> None:
        pytest.fail("the rows were converted")

    monkeypatch.setattr(columns_cache, "_convert", convert)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_has_the_losses_of_the_parquet_file_of_the_same_rows(
    package: Package, tmp_path: Path, shards: int
) -> None:
    saved = dataset()
    saved.save_to_disk(tmp_path / "saved", num_shards=shards)
    saved.to_parquet(tmp_path / "rows.parquet")
    expected = losses(package, tmp_path / "rows.parquet", tmp_path / "parquet")
    assert losses(package, tmp_path / "saved", tmp_path / "run") == expected
    assert expected[0] > expected[-1]


def test_rows_and_fingerprint_are_those_of_the_parquet_file(
    package: Package, tmp_path: Path
) -> None:
    saved = dataset().shuffle(seed=3).select(range(31))
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    saved.to_parquet(tmp_path / "rows.parquet")
    mapped = opened(tmp_path / "saved", package, tmp_path / "cache")
    converted = opened(tmp_path / "rows.parquet", package, tmp_path / "cache")
    assert (mapped.size, mapped.fingerprint) == (converted.size, converted.fingerprint)
    order = np.random.default_rng(0).permutation(31)
    assert mapped.batch(order)["tokens"].equal(converted.batch(order)["tokens"])
    rows = pq.read_table(tmp_path / "rows.parquet")["tokens"].to_pylist()
    assert mapped.batch(order)["tokens"].tolist() == [rows[i] for i in order]


def test_the_rows_are_read_from_the_folder_without_a_copy(
    package: Package, tmp_path: Path, no_conversion: None
) -> None:
    dataset().save_to_disk(tmp_path / "saved")
    assert opened(tmp_path / "saved", package, tmp_path / "cache").size == ROWS
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_a_row_that_does_not_exist_is_an_error(package: Package, tmp_path: Path) -> None:
    dataset().save_to_disk(tmp_path / "saved")
    with pytest.raises(IndexError):
        opened(tmp_path / "saved", package, tmp_path / "cache").batch(np.array([ROWS]))


def test_every_split_of_a_dataset_dict_is_a_data_set(package: Package, tmp_path: Path) -> None:
    both = datasets.DatasetDict(train=dataset(), test=dataset(8, 2))
    both.save_to_disk(tmp_path / "both")
    assert opened(tmp_path / "both" / "test", package, tmp_path / "cache").size == 8


def test_a_dataset_dict_names_its_splits(package: Package, tmp_path: Path) -> None:
    datasets.DatasetDict(train=dataset(), test=dataset(8, 2)).save_to_disk(tmp_path / "both")
    with pytest.raises(MissingDataError, match="a data set for each split") as caught:
        opened(tmp_path / "both", package, tmp_path / "cache")
    assert str(tmp_path / "both" / "test") in str(caught.value)


def test_a_folder_that_was_copied_in_part_is_rejected(package: Package, tmp_path: Path) -> None:
    dataset().save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(MissingDataError, match="no data-00001-of-00003"):
        opened(tmp_path / "saved", package, tmp_path / "cache")


def test_files_that_the_dataset_does_not_list_are_not_read(
    package: Package, tmp_path: Path
) -> None:
    dataset().save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "cache-0123.arrow").write_bytes(b"left by datasets")
    assert opened(tmp_path / "saved", package, tmp_path / "cache").size == ROWS


def test_rows_of_another_length_are_named(package: Package, tmp_path: Path) -> None:
    rows: list[Any] = list(token_rows(4))
    rows[2] = rows[2][:-1]
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint8"))})
    made = datasets.Dataset.from_dict({"tokens": rows}, features=features)
    made.save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="row 2"):
        opened(tmp_path / "saved", package, tmp_path / "cache")


def test_a_saved_dataset_at_a_url_is_complete_too(package: Package, tmp_path: Path) -> None:
    import fsspec

    dataset().save_to_disk(tmp_path / "saved", num_shards=3)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "saved"), "/saved-at-url", recursive=True)
    memory.pipe("/saved-at-url/cache-0123.arrow", b"left by datasets")
    source: Any = "memory://saved-at-url"
    assert opened(source, package, tmp_path / "cache").size == ROWS
    memory.rm("/saved-at-url/data-00002-of-00003.arrow")
    with pytest.raises(MissingDataError, match="no data-00002-of-00003"):
        opened(source, package, tmp_path / "cache")


def test_arrays_have_their_shape_where_datasets_is_imported(tmp_path: Path) -> None:
    features = datasets.Features(
        {"x": datasets.Array2D((2, 3), "float32"), "y": datasets.ClassLabel(num_classes=2)}
    )
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    made = datasets.Dataset.from_dict({"x": values, "y": [0, 1, 1, 0]}, features=features)
    made.save_to_disk(tmp_path / "saved")
    assert source_columns(tmp_path / "saved") == {"x": ("float32", (2, 3)), "y": ("int64", ())}


def test_booleans_are_converted(tmp_path: Path) -> None:
    from trainload.capture.program import InputSpec

    made = datasets.Dataset.from_dict({"mask": [[True, False], [False, True], [True, True]]})
    made.save_to_disk(tmp_path / "saved")
    specs = [InputSpec("mask", "bool", ("rows", 2))]
    found = open_dataset(tmp_path / "saved", specs, tmp_path / "cache")
    assert found.batch(np.array([1, 2]))["mask"].tolist() == [[False, True], [True, True]]
