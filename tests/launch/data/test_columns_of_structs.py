"""Columns that no input can have, such as lists of chat messages, are rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainload.capture.program import InputSpec
from trainload.core.errors import DataError
from trainload.launching.data.dataset import check_schema, open_dataset, source_columns
from trainload.launching.data.run_data import open_run_data
from trainload.packaging.package import Package

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
CHAT = [
    [{"role": "user", "content": "hello"}],
    [{"role": "user", "content": "why?"}, {"role": "model", "content": "so"}],
]
COLUMNS = {
    "a list of structs": pa.array(CHAT, pa.list_(MESSAGE)),
    "a list of lists of structs": pa.array(
        [[each] for each in CHAT], pa.list_(pa.large_list(MESSAGE))
    ),
    "a fixed list of structs": pa.array([each[:1] for each in CHAT], pa.list_(MESSAGE, 1)),
    "a struct": pa.array([each[0] for each in CHAT], MESSAGE),
    "a map": pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
}
INPUTS = [InputSpec("messages", "int64", ("batch", "length"))]


def write(path: Path, column: Any) -> Path:
    table = pa.table({"messages": column})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return path


def converted(path: Path) -> object:
    return open_dataset(path, INPUTS, path.parent / "cache")


def checked(path: Path) -> object:
    return check_schema(path, INPUTS)


@pytest.mark.parametrize("read", [checked, converted])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_no_numbers_is_refused_by_name(
    name: str, ending: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=r"input 'messages' has the wrong dtype \(expected int64, got (struct|map)<"
    ):
        read(write(tmp_path / f"rows.{ending}", COLUMNS[name]))


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_run_refuses_such_a_column_by_name(
    name: str, ending: str, gpt: Package, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError,
        match=r"column 'messages' has a dtype that inputs do not support .*, got (struct|map)<",
    ):
        open_run_data(write(tmp_path / f"rows.{ending}", COLUMNS[name]), gpt, 4, tmp_path / "cache")


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_schema_tells_what_the_lists_hold(ending: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{ending}", COLUMNS["a list of structs"])
    assert source_columns(path)["messages"][0].startswith("struct<")
