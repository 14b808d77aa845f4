"""Reader of npz files: one array for each input, rows along the leading dim."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO

import numpy as np

from trainload.capture.program import InputSpec
from trainload.core.errors import DataError
from trainload.launching.data.columns import (
    BLOCK_BYTES,
    Array,
    ColumnType,
    FileSchema,
    Sizes,
    native,
    one_length,
    unreadable,
)
from trainload.launching.data.data_files import DataFile

_READ_ERRORS = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, NotImplementedError)
"""Exceptions of zipfile and numpy for files that are not npz files, are truncated or were
changed.
"""


def read_schema(file: DataFile) -> FileSchema:
    """Read the schema from the arrays' headers alone (see `Reader`)."""
    columns: dict[str, ColumnType] = {}
    rows: dict[str, int] = {}
    with _open_archive(file) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            with archive.open(member) as stream:
                shape, _, dtype = read_header(stream)
            if not shape:
                raise DataError(
                    "an array has no rows",
                    where=f"{file.name}, array {name!r}",
                    expected="a leading dim",
                    got="shape ()",
                )
            # the name is the same for both byte orders
            columns[name] = ColumnType(dtype.name, shape[1:])
            rows[name] = shape[0]
    return FileSchema(file.name, one_length(rows, file.name), columns)


def first_row(file: DataFile) -> Mapping[str, ColumnType] | None:
    """Return the columns if there are rows (see `Reader`)."""
    schema = read_schema(file)
    return schema.columns if schema.rows else None


def read_blocks(
    file: DataFile, inputs: Sequence[InputSpec], sizes: Sizes
) -> Iterator[dict[str, Array]]:
    """Yield blocks of rows (see `Reader`).

    Arrays are streamed; only those in Fortran order are read as a whole.
    """
    with _open_archive(file) as archive, ExitStack() as stack:
        readers = {
            spec.name: _ArrayReader(stack.enter_context(archive.open(f"{spec.name}.npy")))
            for spec in inputs
        }
        total = next(iter(readers.values())).rows
        step = max(1, BLOCK_BYTES // max(1, *(reader.row_bytes for reader in readers.values())))
        for start in range(0, total, step):
            count = min(step, total - start)
            yield {name: reader.take(count) for name, reader in readers.items()}
        for reader in readers.values():
            reader.finish()


@contextmanager
def _open_archive(file: DataFile) -> Iterator[zipfile.ZipFile]:
    try:
        with file.opened() as stream, zipfile.ZipFile(stream) as archive:
            yield archive
    except DataError:
        raise
    except (*_READ_ERRORS, KeyError) as error:
        raise unreadable(file, "an npz file", error) from error


class _ArrayReader:
    """Sequential reader of one array of the archive."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._shape, fortran, self._dtype = read_header(stream)
        self.rows = self._shape[0]
        self.row_bytes = int(np.prod(self._shape[1:], dtype=np.int64)) * self._dtype.itemsize
        self._whole: Array | None = None
        self._taken = 0
        if fortran:
            flat = self._read(self.rows * self.row_bytes)
            self._whole = np.ascontiguousarray(flat.reshape(self._shape, order="F"))

    def take(self, count: int) -> Array:
        """Return the next `count` rows."""
        start, self._taken = self._taken, self._taken + count
        if self._whole is not None:
            return self._whole[start : self._taken]
        return self._read(count * self.row_bytes).reshape(count, *self._shape[1:])

    def finish(self) -> None:
        """Read to the end, so that zipfile checks the checksum; raise ValueError if there are more
        bytes.
        """
        if self._stream.read(1):
            raise ValueError("an array is longer than its header says")

    def _read(self, size: int) -> Array:
        """Read `size` bytes, and return them as values in this machine's byte order."""
        data = self._stream.read(size)
        if len(data) != size:
            raise ValueError("an array is shorter than its header says")
        values: Array = np.frombuffer(data, dtype=self._dtype)
        return native(values)


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Return shape, Fortran order (bool) and dtype of an array.

    Raises ValueError if the stream is not an array.
    """
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"an array has format version {version}")
