"""Folders that `save_to_disk` of Hugging Face datasets writes, here written by hand.

tests/integrations/hf_datasets has the same with the library itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trainload.capture.program import InputSpec
from trainload.core.errors import DataError, MissingDataError
from trainload.launching.data.dataset import open_dataset

SPECS = [InputSpec("tokens", "int64", ("rows", 3))]
TOKENS = np.arange(30).reshape(10, 3)


def save(folder: Path, **state: Any) -> Path:
    """Write two Arrow streams, of which the second has the first rows."""
    folder.mkdir()
    for name, rows in (("b.arrow", TOKENS[:4]), ("a.arrow", TOKENS[4:])):
        table = pa.table({"tokens": rows.tolist()})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    listed = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}
    (folder / "state.json").write_text(json.dumps(listed | state))
    return folder


def test_the_files_are_read_in_the_order_in_which_they_are_listed(tmp_path: Path) -> None:
    data = open_dataset(save(tmp_path / "saved"), SPECS, tmp_path / "cache")
    assert data.batch(np.arange(10))["tokens"].tolist() == TOKENS.tolist()


def test_nothing_is_copied_into_the_cache(tmp_path: Path) -> None:
    open_dataset(save(tmp_path / "saved"), SPECS, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy"))


def test_other_values_have_another_fingerprint(tmp_path: Path) -> None:
    first = open_dataset(save(tmp_path / "saved"), SPECS, tmp_path / "cache")
    other = save(tmp_path / "other", _data_files=[{"filename": "a.arrow"}])
    assert open_dataset(other, SPECS, tmp_path / "cache").fingerprint != first.fingerprint


def test_a_file_outside_the_folder_is_rejected(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", _data_files=[{"filename": "../a.arrow"}])
    with pytest.raises(DataError, match="not in its folder"):
        open_dataset(folder, SPECS, tmp_path / "cache")


def test_a_file_that_is_listed_and_missing_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", _data_files=[{"filename": "c.arrow"}])
    with pytest.raises(MissingDataError, match=r"no c\.arrow"):
        open_dataset(folder, SPECS, tmp_path / "cache")


def test_a_state_of_another_program_lists_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved")
    (folder / "state.json").write_text('{"step": 3}')
    data = open_dataset(folder, SPECS, tmp_path / "cache")
    assert data.batch(np.arange(10))["tokens"].tolist() == [
        *TOKENS[4:].tolist(),
        *TOKENS[:4].tolist(),
    ]


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_rows_that_indices_select_are_not_replaced_by_all_rows(tmp_path: Path, key: str) -> None:
    folder = save(tmp_path / "saved", **{key: [{"filename": "indices.arrow"}]})
    with pytest.raises(DataError, match="a file of indices"):
        open_dataset(folder, SPECS, tmp_path / "cache")


def test_a_saved_dataset_without_rows_is_called_so(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", _data_files=[])
    with pytest.raises(MissingDataError, match="the data set has no rows"):
        open_dataset(folder, SPECS, tmp_path / "cache")


def test_a_state_that_is_nested_deeply_lists_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved")
    (folder / "state.json").write_text("[" * 200_000)
    assert open_dataset(folder, SPECS, tmp_path / "cache").size == len(TOKENS)
