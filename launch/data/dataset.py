"""Datasets: files -> batches of exactly the inputs that a package declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from trainload.capture.program import InputSpec
from trainload.core.errors import DataError
from trainload.launching.data import (
    columns_arrow,
    columns_npz,
    columns_parquet,
    columns_safetensors,
    columns_tar,
)
from trainload.launching.data.columns import (
    Array,
    FileSchema,
    Reader,
    Sizes,
    check_file,
    check_inputs,
)
from trainload.launching.data.columns_cache import CachedColumns, make_cached
from trainload.launching.data.data_files import DataFile, Source, find_files, spelled
from trainload.launching.data.mapped_columns import (
    MappedColumn,
    MappedColumns,
    is_saved,
    map_columns,
)
from trainload.launching.data.sampler import Rows

READERS: Mapping[str, Reader] = {
    ".parquet": columns_parquet,
    ".arrow": columns_arrow,
    ".feather": columns_arrow,
    ".npz": columns_npz,
    ".safetensors": columns_safetensors,
    ".tar": columns_tar,
}
"""File name suffix -> module that reads the format."""


class Dataset:
    """Memory-mapped rows on disk: of the node's cache, or of a saved dataset itself.

    Attributes:
        size: number of rows, at least 1.
        fingerprint: SHA-256 of names, dtypes, shapes and values. It does not depend on the files
            that contain the rows.
    """

    __slots__ = ("_columns", "fingerprint", "size")

    def __init__(self, columns: CachedColumns | MappedColumns) -> None:
        self.size = columns.rows
        self.fingerprint = columns.fingerprint
        self._columns: Mapping[str, Array | MappedColumn]
        if isinstance(columns, MappedColumns):
            self._columns = columns.columns
        else:
            self._columns = {
                name: np.load(path, mmap_mode="r") for name, path in columns.files.items()
            }

    def batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return rows in the given order.

        Args:
            rows: (n,) int64, each in [0, size).

        Returns:
            Input name -> (n, *dims) tensor of the declared dtype, on the CPU, with its own memory.

        Raises:
            IndexError: the dataset does not have one of the rows.
        """
        if rows.size and int(rows.min()) < 0:
            raise IndexError(
                f"row {int(rows.min())} is out of range for a data set of {self.size} rows"
            )
        return {
            name: torch.from_numpy(
                column.take(rows)
                if isinstance(column, MappedColumn)
                else np.asarray(np.take(column, rows, axis=0))
            )
            for name, column in self._columns.items()
        }


def open_dataset(source: Source, inputs: Sequence[InputSpec], cache_dir: Path) -> Dataset:
    """Open a dataset for a package's inputs, converting it once per node into `cache_dir` unless it
    is a saved dataset that can be mapped.

    The leading dim of an input is its rows. Its other sizes are ints, or symbols that stand for the
    same length in all rows.

    Raises:
        DataError: the source is missing, empty or unreadable, or does not fit the inputs: a column
            is missing or superfluous, has another dtype (nothing is cast), other lengths, or nulls.
        StorageError: the cache cannot be written, or a URL cannot be reached.
    """
    check_inputs(inputs)
    files = _find_same_format(source)

    def read() -> tuple[int, Iterator[dict[str, Array]]]:
        schemas, sizes = _read_schemas(source, files, inputs)
        full = [file for file, schema in zip(files, schemas, strict=True) if schema.rows]
        blocks = chain.from_iterable(
            _reader_of(file).read_blocks(file, inputs, sizes) for file in full
        )
        return sum(schema.rows for schema in schemas), blocks

    if is_saved(files):
        schemas, sizes = _read_schemas(source, files, inputs)
        full = [file for file, schema in zip(files, schemas, strict=True) if schema.rows]
        mapped = map_columns(cache_dir, full, inputs, sizes)
        if mapped is not None:
            return Dataset(mapped)
    return Dataset(make_cached(cache_dir, files, inputs, read))


def check_schema(source: Source, inputs: Sequence[InputSpec]) -> int:
    """Check a source against a package's inputs by the files' metadata alone; return the number of
    rows.

    Raises:
        DataError: as for `open_dataset`, except for nulls and lists of unequal length, which
            metadata does not show.
    """
    check_inputs(inputs)
    schemas, _ = _read_schemas(source, _find_same_format(source), inputs)
    return sum(schema.rows for schema in schemas)


def source_columns(source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return each column's dtype and the shape of its first row, from the first file that has rows.

    Raises:
        DataError: the source is missing, empty or unreadable.
    """
    for file in _find_same_format(source):
        columns = _reader_of(file).first_row(file)
        if columns is not None:
            return {
                name: (column.dtype, tuple(d for d in column.dims if d is not None))
                for name, column in columns.items()
            }
    raise _empty_error(source)


def _find_same_format(source: Source) -> tuple[DataFile, ...]:
    """Return the files of a source, which must all have one format."""
    files = find_files(source, READERS)
    readers = {READERS.get(file.suffix) for file in files}
    if len(readers) > 1 or None in readers:
        raise DataError(
            "all files of a data set must have the same format",
            where=spelled(source),
            expected="names that all end in one of " + ", ".join(READERS),
            got=", ".join(kind or "no ending" for kind in sorted({file.suffix for file in files})),
            hint="Convert the files, or specify only some of them.",
        )
    return files


def _reader_of(file: DataFile) -> Reader:
    return READERS[file.suffix]


def _read_schemas(
    source: Source, files: Sequence[DataFile], inputs: Sequence[InputSpec]
) -> tuple[list[FileSchema], Sizes]:
    sizes = Sizes(inputs)
    schemas: list[FileSchema] = []
    for file in files:
        schema = _reader_of(file).read_schema(file)
        if schema.rows or schema.columns:  # a tar file without rows has no columns
            check_file(schema, inputs, sizes)
        schemas.append(schema)
    if not sum(schema.rows for schema in schemas):
        raise _empty_error(source)
    return schemas, sizes


def _empty_error(source: Source) -> DataError:
    return DataError(
        "the data set is empty", where=spelled(source), expected="at least one row", got="0 rows"
    )
