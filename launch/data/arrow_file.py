"""Write rows in memory to an Arrow file, which a run can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from trainload.core.atomic import replacing
from trainload.core.errors import DataError, StorageError
from trainload.launching.data.columns import DTYPES, Array, native

Batch: TypeAlias = Mapping[str, Any] | pa.Table | pa.RecordBatch
"""A batch of rows: column -> array, tensor or list of shape (n, *dims); or an Arrow table or record
batch.
"""


def write_rows(batches: Iterable[Batch], path: str | Path) -> int:
    """Write rows to an Arrow file, which `launch` accepts as data. The write is atomic.

    Args:
        batches: rows in order. All batches must have the same columns, with the same dtypes (bool,
            int8 to int64, uint8 to uint64, float16 to float64) and dims; their numbers of rows may
            differ.
        path: path of the file, which should end in .arrow. An existing file is replaced.

    Returns:
        The number of rows.

    Raises:
        DataError: a batch has other columns, dtypes or dims than the first, a value cannot be
            stored, or there are no rows.
        StorageError: the file cannot be written.

    Example:
        tokens = numpy.random.randint(0, 12, (64, 5), dtype=numpy.uint8)
        trainload.write_rows([{"tokens": tokens}], "train.arrow")
        trainload.launch(package, plan, "train.arrow", run_dir="runs/first")
    """
    path = Path(path)
    try:
        with replacing(path) as temporary:
            return _write_batches(batches, temporary)
    except OSError as error:
        raise StorageError(
            f"the rows cannot be written: {error.strerror or error}", where=str(path)
        ) from error


def _write_batches(batches: Iterable[Batch], draft: Path) -> int:
    rows, schema, writer = 0, None, None
    with draft.open("wb") as file:
        try:
            for number, user_batch in enumerate(batches):
                for batch in _record_batches(user_batch, number):
                    if writer is None:
                        schema = batch.schema
                        writer = pa.ipc.new_file(file, schema)
                    if not batch.schema.equals(schema):
                        raise DataError(
                            "a batch has different columns than the first one",
                            where=f"batch {number}",
                            expected=_describe_schema(schema),
                            got=_describe_schema(batch.schema),
                        )
                    writer.write_batch(batch)
                    rows += batch.num_rows
        finally:
            if writer is not None:
                writer.close()
    if not rows:
        raise DataError("there are no rows", expected="at least one")
    return rows


def _record_batches(user_batch: Batch, number: int) -> list[Any]:
    if isinstance(user_batch, pa.RecordBatch):
        return [user_batch]
    if isinstance(user_batch, pa.Table):
        batches: list[Any] = user_batch.to_batches()
        return batches
    if not isinstance(user_batch, Mapping):
        expected = "a dict of arrays, a pyarrow.Table or a pyarrow.RecordBatch"
        raise DataError(
            "this is not a batch of rows",
            where=f"batch {number}",
            expected=expected,
            got=type(user_batch).__name__,
        )
    arrays = {
        name: _to_array(value, f"batch {number}, column {name!r}")
        for name, value in user_batch.items()
    }
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(
            "the columns of a batch have different numbers of rows",
            where=f"batch {number}",
            got=str(lengths),
        )
    return [pa.record_batch({name: _to_lists(array) for name, array in arrays.items()})]


def _to_array(value: Any, where: str) -> Array:
    try:
        array = (
            value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        )
    except (TypeError, ValueError) as error:  # numpy lacks the dtype, or the rows differ in length
        raise DataError("a column is not an array", where=where, got=str(error)) from error
    if array.dtype.name not in DTYPES:
        dtype_name = array.dtype.name
        hint = "Pad or truncate rows of different lengths." if dtype_name == "object" else ""
        raise DataError(
            "a column has a dtype that data files do not support",
            where=where,
            expected=", ".join(DTYPES),
            got=dtype_name,
            hint=hint,
        )
    if not array.ndim or 0 in array.shape[1:]:
        raise DataError(
            "a column has no values",
            where=where,
            expected="(n, *dims), each dim 1 or more",
            got=str(array.shape),
        )
    return native(array)


def _to_lists(array: Array) -> Any:
    """Convert an array (n, *dims) to nested fixed-size lists."""
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for length in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, length)
    return column


def _describe_schema(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
