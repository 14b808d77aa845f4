"""Columns of data files, and their comparison with a package's inputs.

The readers of the file formats (`columns_*.py`) return a `FileSchema` from the metadata alone, and
yield the columns' values in blocks. All use `Sizes` to compare lengths with the declared ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainload.capture.program import InputSpec, SizeLike
from trainload.core.errors import DataError
from trainload.launching.data.data_files import DataFile

Array = npt.NDArray[np.generic]

DTYPES: Mapping[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes that data files may have. Their names are the same in torch and numpy."""

BLOCK_BYTES = 32 << 20
"""Approximate size of a block of rows while files are converted."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column of a data file.

    Attributes:
        dtype: dtype of its scalars; if it is not in `DTYPES`, its name in the file.
        dims: lengths of a row's dims, without the batch dim; None for a length that only the values
            show.
    """

    dtype: str
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class FileSchema:
    """Name, number of rows and columns of a file, from its metadata."""

    name: str
    rows: int
    columns: Mapping[str, ColumnType]


class Reader(Protocol):
    """A module that reads files of one format.

    Each function raises DataError if the file does not have the format, and the errors of
    `DataFile` if a URL fails.
    """

    def read_schema(self, file: DataFile) -> FileSchema:
        """Return a file's columns and number of rows, without reading values if the format allows
        it.
        """

    def first_row(self, file: DataFile) -> Mapping[str, ColumnType] | None:
        """Return the columns with all lengths of the first row's dims; None if there are no rows.

        Raises DataError if the first row has nulls.
        """

    def read_blocks(
        self, file: DataFile, inputs: Sequence[InputSpec], sizes: Sizes
    ) -> Iterator[dict[str, Array]]:
        """Yield the rows of a file whose schema was checked, in order, as blocks.

        A block maps input names to (n, *dims) arrays of the declared dtype.

        Raises:
            DataError: there are nulls, or a row does not have the declared lengths; names the row.
        """


def native(array: Array) -> Array:
    """Return an array in this machine's byte order; it is not copied if it has that order
    already.
    """
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class Sizes:
    """Lengths of the inputs' dims: declared lengths, and symbols that the first row binds.

    Law: a symbol has the same length in all rows and all inputs.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._shapes = {spec.name: spec.shape for spec in inputs}
        self._bound: dict[str, int] = {}

    def expect(self, name: str, dim: int, length: int, where: str) -> None:
        """Raise DataError, at `where`, unless dim `dim` (>= 1) of input `name` has its declared or
        bound length.
        """
        expected = self.bind(name, dim, length)
        if expected != length:
            symbol = self._shapes[name][dim]
            raise DataError(
                f"input {name!r} has the wrong shape",
                where=where,
                expected=f"length {expected} in dim {dim}"
                + ("" if isinstance(symbol, int) else f" ({symbol}, as in the rows before)"),
                got=f"length {length}",
                hint=(
                    "All rows of a data set must have the same shape: pad, truncate or drop the"
                    " others."
                ),
            )

    def bind(self, name: str, dim: int, length: int) -> int:
        """Return the length of a dim; a symbol that is not bound yet is bound to `length`."""
        size: SizeLike = self._shapes[name][dim]
        return size if isinstance(size, int) else self._bound.setdefault(size, length)


def check_inputs(inputs: Sequence[InputSpec]) -> None:
    """Raise DataError if an input cannot be read from a data file at all."""
    for spec in inputs:
        if spec.dtype not in DTYPES:
            raise DataError(
                f"input {spec.name!r} has a dtype that data files do not support",
                expected=", ".join(DTYPES),
                got=spec.dtype,
                hint="Use one of these dtypes for the input and convert it inside the model.",
            )
        if not spec.shape:
            raise DataError(
                f"input {spec.name!r} has no batch dim, so a data set cannot provide it",
                expected="a shape that begins with the batch dim",
                got="()",
                hint=(
                    "Freeze the job again with this input declared in Job.shared, or with a batch"
                    " dim."
                ),
            )


def check_file(schema: FileSchema, inputs: Sequence[InputSpec], sizes: Sizes) -> None:
    """Raise DataError if a file's metadata does not fit the inputs: missing and extra columns,
    dtypes, shapes.
    """
    names = {spec.name for spec in inputs}
    expected, got = ", ".join(sorted(names)), ", ".join(sorted(schema.columns))
    missing = sorted(names - set(schema.columns))
    if missing:
        raise DataError(
            f"the data has no column {_quoted(missing)}",
            where=schema.name,
            expected=expected,
            got=got,
            hint=(
                "Give the columns the names of the package's inputs (`trainload inspect` lists"
                " them)."
            ),
        )
    extra = sorted(set(schema.columns) - names)
    if extra:
        raise DataError(
            f"the data has columns that are not inputs of the package: {_quoted(extra)}",
            where=schema.name,
            expected=expected,
            got=got,
            hint=f"Write the file with only these columns: {expected}.",
        )
    for spec in inputs:
        _check_column(
            spec, schema.columns[spec.name], sizes, f"{schema.name}, column {spec.name!r}"
        )


def _check_column(spec: InputSpec, column: ColumnType, sizes: Sizes, where: str) -> None:
    if column.dtype != spec.dtype:
        raise DataError(
            f"input {spec.name!r} has the wrong dtype",
            where=where,
            expected=spec.dtype,
            got=column.dtype,
            hint=f"Values are never cast silently: write the column as {spec.dtype}.",
        )
    if len(column.dims) != len(spec.shape) - 1:
        raise DataError(
            f"input {spec.name!r} has the wrong number of dims",
            where=where,
            expected=f"rows of {len(spec.shape) - 1} dims, shape ({_shape(spec.shape)})",
            got=f"rows of {len(column.dims)} dims",
            hint=(
                "A row's dims are nested lists in Parquet and Arrow files, and the trailing dims of"
                " arrays."
            ),
        )
    for dim, length in enumerate(column.dims, start=1):
        if length is not None:
            sizes.expect(spec.name, dim, length, where)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _shape(shape: tuple[SizeLike, ...]) -> str:
    return ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "")


def one_length(rows: Mapping[str, int], where: str) -> int:
    """Return the common number of rows of a file's arrays; 0 if it has none.

    Raises DataError if they differ.
    """
    if len(set(rows.values())) > 1:
        raise DataError(
            "the arrays have different numbers of rows",
            where=where,
            expected="the same length of the leading dim",
            got=", ".join(f"{name}: {count}" for name, count in sorted(rows.items())),
            hint="Write arrays with one entry per row.",
        )
    return next(iter(rows.values()), 0)


def unreadable(file: DataFile, kind: str, error: Exception) -> DataError:
    """Return the error for a file that does not have the format of its name.

    `kind` is the format with its article.
    """
    return DataError(
        "the file cannot be read",
        where=file.name,
        expected=kind,
        got=f"{error}",
        hint="Write it again, or omit it.",
    )
