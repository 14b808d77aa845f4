"""Reader of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainload.capture.program import InputSpec
from trainload.launching.data.arrow_values import block_of, column_types, first_row_types
from trainload.launching.data.columns import (
    BLOCK_BYTES,
    Array,
    ColumnType,
    FileSchema,
    Sizes,
    unreadable,
)
from trainload.launching.data.data_files import DataFile

_MAX_ROWS = 1 << 16
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
"""Physical type of a column -> bytes of a value. For other types the stored size counts."""


def read_schema(file: DataFile) -> FileSchema:
    """Read the schema from the footer alone (see `Reader`)."""
    with _open_parquet(file) as opened:
        return FileSchema(
            file.name, opened.metadata.num_rows, column_types(opened.schema_arrow, file.name)
        )


def first_row(file: DataFile) -> dict[str, ColumnType] | None:
    """Return the columns of the first row (see `Reader`)."""
    with _open_parquet(file) as opened:
        batch = next(opened.iter_batches(batch_size=1), None)
        return first_row_types(batch, file.name) if batch is not None and batch.num_rows else None


def read_blocks(
    file: DataFile, inputs: Sequence[InputSpec], sizes: Sizes
) -> Iterator[dict[str, Array]]:
    """Yield blocks of rows (see `Reader`). One row group is read at a time."""
    names = [spec.name for spec in inputs]
    with _open_parquet(file) as opened:
        start = 0
        for batch in opened.iter_batches(batch_size=_rows_per_block(opened, names), columns=names):
            yield block_of(batch, names, file.name, start, sizes)
            start += batch.num_rows


@contextmanager
def _open_parquet(file: DataFile) -> Iterator[Any]:
    try:
        with file.opened() as stream, pq.ParquetFile(stream, pre_buffer=False) as opened:
            yield opened
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file, "a Parquet file", error) from error


def _rows_per_block(file: Any, names: Sequence[str]) -> int:
    """Return the number of rows to read at once, from the decoded size of the values, since encoded
    ones may be tiny.
    """
    metadata, size = file.metadata, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            path = f"{column.path_in_schema}."  # the path of a list's values is NAME.list.element
            if any(path.startswith(f"{name}.") for name in names):
                width = _VALUE_BYTES.get(column.physical_type, 0)
                size += max(column.num_values * width, column.total_uncompressed_size)
    return max(1, min(_MAX_ROWS, BLOCK_BYTES * max(1, int(metadata.num_rows)) // max(1, size)))
