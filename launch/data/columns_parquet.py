"""Columns of Parquet files: scalars, and lists of equal length, nested to any depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainload.capture.errors import DataError
from trainload.capture.program import InputSpec
from trainload.launch.data.columns import BLOCK_BYTES, Array, ColumnType, FileSchema, Sizes, unreadable

_SPELLING = {"halffloat": "float16", "float": "float32", "double": "float64"}
_MOST_ROWS = 1 << 16


def read_schema(path: Path) -> FileSchema:
    """A file's columns and rows, from its footer alone. Raises: DataError where it cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            columns = {field.name: _column_type(field.type) for field in file.schema_arrow}
            if len(columns) < len(file.schema_arrow):
                raise DataError("two columns have one name", where=str(path), cure="Rename one of them.")
            return FileSchema(path, file.metadata.num_rows, columns)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, "Parquet", error) from error


def read_blocks(path: Path, inputs: Sequence[InputSpec], sizes: Sizes) -> Iterator[dict[str, Array]]:
    """The file's rows in order, as blocks: input name -> (n, *dims) array of the declared dtype.

    One row group is read at a time. Expects a file whose schema was checked. Raises: DataError for nulls, for rows whose
    lengths are not the declared ones, naming the row, and where the file cannot be read.
    """
    names = [spec.name for spec in inputs]
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            start = 0
            for block in file.iter_batches(batch_size=_rows_of_a_block(file), columns=names):
                yield {name: _dense(block.column(name), name, path, start, sizes) for name in names}
                start += block.num_rows
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, "Parquet", error) from error


def first_row(path: Path, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The lengths of the dims of some columns' first row. Raises: DataError where it holds nulls, or the file cannot be read."""
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            block = next(file.iter_batches(batch_size=1, columns=list(names)))
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, "Parquet", error) from error
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        column, dims = block.column(name), list[int]()
        while pa.types.is_nested(column.type):
            _refuse_nulls(column, f"{path}, column {name!r}", 0, 1)
            dims.append(len(column[0]) if len(column) else 0)
            column = column.flatten()
        found[name] = tuple(dims)
    return found


def _rows_of_a_block(file: Any) -> int:
    rows = int(file.metadata.num_rows)
    size = int(sum(file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups)))
    return max(1, min(_MOST_ROWS, BLOCK_BYTES * max(1, rows) // max(1, size)))


def _column_type(kind: Any) -> ColumnType:
    dims: list[int | None] = []
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        dims.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    return ColumnType(_SPELLING.get(str(kind), str(kind)), tuple(dims))


def _dense(column: Any, name: str, path: Path, start: int, sizes: Sizes) -> Array:
    """An Arrow array of n rows as (n, *dims); `start` is the number of its first row in the file."""
    place = f"{path}, column {name!r}"
    shape = [len(column)]
    while pa.types.is_nested(column.type):
        lists_per_row = int(np.prod(shape[1:], dtype=np.int64))
        _refuse_nulls(column, place, start, lists_per_row)
        if pa.types.is_fixed_size_list(column.type):
            length = int(column.type.list_size)
            sizes.expect(name, len(shape), length, place)
        else:
            length = _common_length(column, name, len(shape), place, start, lists_per_row, sizes)
        shape.append(length)
        column = column.flatten()
    _refuse_nulls(column, place, start, int(np.prod(shape[1:], dtype=np.int64)))
    values: Array = column.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def _common_length(column: Any, name: str, dim: int, place: str, start: int, lists_per_row: int, sizes: Sizes) -> int:
    """The one length of all lists of a list array. Raises: DataError at the first row that has another."""
    lengths = np.diff(column.offsets.to_numpy())
    if not lengths.size:
        return sizes.bind(name, dim, 0)
    wanted = sizes.bind(name, dim, int(lengths[0]))
    wrong = np.flatnonzero(lengths != wanted)
    if wrong.size:
        sizes.expect(name, dim, int(lengths[wrong[0]]), f"{place}, row {start + int(wrong[0]) // lists_per_row}")
    return wanted


def _refuse_nulls(column: Any, place: str, start: int, entries_per_row: int) -> None:
    if column.null_count:
        first = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            "the data holds nulls",
            where=f"{place}, row {start + first // max(1, entries_per_row)}",
            expected="a value in every place",
            got=f"{column.null_count} nulls in one block of rows",
            cure="Fill them in or leave the rows out.",
        )
