"""What the columns of a data file are, and whether they fit a package's inputs.

The readers of the file formats (`columns_*.py`) give a `FileSchema` from the metadata alone, and the columns' values in blocks; all use
`Sizes` to hold lengths to what was declared.
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
"""The dtypes that data files may hold. torch and numpy spell them alike."""

BLOCK_BYTES = 32 << 20
"""About what one block of rows may take while files are converted."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column: the dtype of its scalars (as its file spells it, if not one of `DTYPES`), and the lengths of a row's dims.

    `dims` leaves out the batch dim; None is a length that only the values tell.
    """

    dtype: str
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class FileSchema:
    """What the metadata of one file says: its name, its number of rows and its columns."""

    name: str
    rows: int
    columns: Mapping[str, ColumnType]


class Reader(Protocol):
    """A module that reads files of one format. Each function raises: DataError where the file is not of the format; what `DataFile` raises
    where it is at a URL that fails.
    """

    def read_schema(self, file: DataFile) -> FileSchema:
        """A file's columns and rows; no values are read where the format allows it."""

    def first_row(self, file: DataFile) -> Mapping[str, ColumnType] | None:
        """The columns, with all lengths of the first row's dims; None where there are no rows. Raises: DataError where it holds nulls."""

    def read_blocks(self, file: DataFile, inputs: Sequence[InputSpec], sizes: Sizes) -> Iterator[dict[str, Array]]:
        """The file's rows in order, as blocks: input name -> (n, *dims) array of the declared dtype. Expects a file whose schema was
        checked. Raises: DataError for nulls, and for rows whose lengths are not the declared ones, naming the row.
        """


def native(array: Array) -> Array:
    """Return an array in this machine's byte order: the same array where it has that order already."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class Sizes:
    """The lengths of the inputs' dims: declared ones, and symbols that are bound by the first row that is seen.

    Law: one symbol has one length, in all rows and all inputs.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._shapes = {spec.name: spec.shape for spec in inputs}
        self._bound: dict[str, int] = {}

    def expect(self, name: str, dim: int, length: int, where: str) -> None:
        """Holds dim `dim` (>= 1) of input `name` to its declared or bound length. Raises: DataError, at `where`."""
        wanted = self.bind(name, dim, length)
        if wanted != length:
            symbol = self._shapes[name][dim]
            raise DataError(
                f"input {name!r} has the wrong shape",
                where=where,
                expected=f"length {wanted} in dim {dim}" + ("" if isinstance(symbol, int) else f" ({symbol}, as in the rows before)"),
                got=f"length {length}",
                hint="All rows of a data set have one shape: pad, cut or leave out the others.",
            )

    def bind(self, name: str, dim: int, length: int) -> int:
        """The length of a dim; a symbol that has none yet gets `length`."""
        size: SizeLike = self._shapes[name][dim]
        return size if isinstance(size, int) else self._bound.setdefault(size, length)


def check_inputs(inputs: Sequence[InputSpec]) -> None:
    """Raises: DataError where an input cannot come from a data file at all."""
    for spec in inputs:
        if spec.dtype not in DTYPES:
            raise DataError(
                f"input {spec.name!r} has a dtype that data files do not hold",
                expected=", ".join(DTYPES),
                got=spec.dtype,
                hint="Let the job take one of these and convert inside the model.",
            )
        if not spec.shape:
            raise DataError(
                f"input {spec.name!r} has no batch dim, so no row of a data set can give it",
                expected="a shape that begins with the batch dim",
                got="()",
                hint="Freeze the job again with this input declared in Job.shared, or with a batch dim.",
            )


def check_file(schema: FileSchema, inputs: Sequence[InputSpec], sizes: Sizes) -> None:
    """Compares a file's metadata with the inputs. Raises: DataError for missing and extra columns, dtypes and shapes."""
    names = {spec.name for spec in inputs}
    expected, got = ", ".join(sorted(names)), ", ".join(sorted(schema.columns))
    missing = sorted(names - set(schema.columns))
    if missing:
        raise DataError(
            f"the data has no column {_quoted(missing)}",
            where=schema.name,
            expected=expected,
            got=got,
            hint="Name the columns as the package's inputs (`trainload inspect` lists them).",
        )
    extra = sorted(set(schema.columns) - names)
    if extra:
        raise DataError(
            f"the data has columns that are no inputs of the package: {_quoted(extra)}",
            where=schema.name,
            expected=expected,
            got=got,
            hint=f"Write the file with these columns alone: {expected}.",
        )
    for spec in inputs:
        _check_column(spec, schema.columns[spec.name], sizes, f"{schema.name}, column {spec.name!r}")


def _check_column(spec: InputSpec, column: ColumnType, sizes: Sizes, where: str) -> None:
    if column.dtype != spec.dtype:
        raise DataError(
            f"input {spec.name!r} has the wrong dtype",
            where=where,
            expected=spec.dtype,
            got=column.dtype,
            hint=f"Nothing is cast silently: write the column as {spec.dtype}.",
        )
    if len(column.dims) != len(spec.shape) - 1:
        raise DataError(
            f"input {spec.name!r} has the wrong number of dims",
            where=where,
            expected=f"rows of {len(spec.shape) - 1} dims, shape ({_shape(spec.shape)})",
            got=f"rows of {len(column.dims)} dims",
            hint="A row's dims are nested lists in Parquet and Arrow files, and trailing dims of arrays.",
        )
    for dim, length in enumerate(column.dims, start=1):
        if length is not None:
            sizes.expect(spec.name, dim, length, where)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _shape(shape: tuple[SizeLike, ...]) -> str:
    return ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "")


def one_length(rows: Mapping[str, int], where: str) -> int:
    """The number of rows of a file's arrays; 0 where it has none. Raises: DataError where they have different ones."""
    if len(set(rows.values())) > 1:
        raise DataError(
            "the arrays have different numbers of rows",
            where=where,
            expected="one length of the leading dim",
            got=", ".join(f"{name}: {count}" for name, count in sorted(rows.items())),
            hint="Write arrays whose rows belong together.",
        )
    return next(iter(rows.values()), 0)


def unreadable(file: DataFile, kind: str, error: Exception) -> DataError:
    """The error for a file whose bytes are not what its name says; `kind`: of file, with its article."""
    return DataError("the file cannot be read", where=file.name, expected=kind, got=f"{error}", hint="Write it again, or leave it out.")
