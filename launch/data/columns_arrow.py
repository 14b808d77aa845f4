"""Reader of Arrow files: the IPC file format (Feather V2), and the IPC stream format, which Hugging
Face datasets use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from trainload.capture.program import InputSpec
from trainload.launching.data.arrow_values import (
    block_of,
    column_types,
    decoded_bytes,
    first_row_types,
)
from trainload.launching.data.columns import (
    BLOCK_BYTES,
    Array,
    ColumnType,
    FileSchema,
    Sizes,
    unreadable,
)
from trainload.launching.data.data_files import DataFile

FILE_MAGIC = b"ARROW1"
"""First bytes of the file format; the stream format has none."""


def read_schema(file: DataFile) -> FileSchema:
    """Read the schema (see `Reader`).

    The formats do not store the number of rows, so one column of each batch is read.
    """
    with record_batches(file, one_column=True) as (schema, batches):
        return FileSchema(
            file.name, sum(batch.num_rows for batch in batches), column_types(schema, file.name)
        )


def first_row(file: DataFile) -> dict[str, ColumnType] | None:
    """Return the columns of the first row (see `Reader`)."""
    with record_batches(file) as (_, batches):
        batch = next((batch for batch in batches if batch.num_rows), None)
        return None if batch is None else first_row_types(batch, file.name)


def read_blocks(
    file: DataFile, inputs: Sequence[InputSpec], sizes: Sizes
) -> Iterator[dict[str, Array]]:
    """Yield blocks of rows (see `Reader`). One record batch is read at a time."""
    names = [spec.name for spec in inputs]
    with record_batches(file) as (_, batches):
        start = 0
        for batch in batches:
            rows = max(1, BLOCK_BYTES * batch.num_rows // max(1, decoded_bytes(batch)))
            for first in range(0, batch.num_rows, rows):
                part = batch.slice(first, rows)
                yield block_of(part, names, file.name, start + first, sizes)
            start += batch.num_rows


@contextmanager
def record_batches(
    file: DataFile, *, one_column: bool = False
) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Yield a file's schema and its record batches. Raises DataError if it is not an Arrow file.

    With `one_column`, record batches of the IPC file format have their first column only.
    """
    try:
        with file.opened() as stream:
            seekable = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
            stream.seek(0)
            if not seekable:
                with pa.ipc.open_stream(stream) as opened:
                    yield opened.schema, iter(opened)
                return
            options = pa.ipc.IpcReadOptions(included_fields=[0]) if one_column else None
            with pa.ipc.open_file(stream, options=options) as opened:
                schema = opened.schema
                if one_column:
                    stream.seek(0)
                    with pa.ipc.open_file(stream) as whole:
                        schema = whole.schema
                yield (
                    schema,
                    (opened.get_batch(number) for number in range(opened.num_record_batches)),
                )
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file, "an Arrow IPC or Feather file", error) from error
