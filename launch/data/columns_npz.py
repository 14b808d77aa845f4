"""Columns of npz files: one array for each input, rows along the leading dim."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from trainload.capture.errors import DataError
from trainload.capture.program import InputSpec
from trainload.launch.data.columns import BLOCK_BYTES, Array, ColumnType, FileSchema, Sizes, unreadable

_BROKEN = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, NotImplementedError)
"""What zipfile and numpy raise on files that are no npz files, are cut short or were changed."""


def read_schema(path: Path) -> FileSchema:
    """A file's columns and rows, from the arrays' headers alone. Raises: DataError where it cannot be read."""
    columns: dict[str, ColumnType] = {}
    rows: dict[str, int] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                with archive.open(member) as stream:
                    shape, _, dtype = _read_header(stream)
                if not shape:
                    raise DataError("an array has no rows", where=f"{path}, array {name!r}", expected="a leading dim", got="shape ()")
                columns[name] = ColumnType(dtype.name if dtype.isnative else dtype.str, shape[1:])
                rows[name] = shape[0]
    except DataError:
        raise
    except _BROKEN as error:
        raise unreadable(path, "npz", error) from error
    if len(set(rows.values())) > 1:
        raise DataError(
            "the arrays have different numbers of rows",
            where=str(path),
            expected="one length of the leading dim",
            got=", ".join(f"{name}: {count}" for name, count in sorted(rows.items())),
            cure="Write arrays whose rows belong together.",
        )
    return FileSchema(path, next(iter(rows.values()), 0), columns)


def read_blocks(path: Path, inputs: Sequence[InputSpec], sizes: Sizes) -> Iterator[dict[str, Array]]:
    """The file's rows in order, as blocks: input name -> (n, *dims) array of the declared dtype.

    Arrays are streamed out of the archive, except those in Fortran order, which are read whole. Expects a file whose schema was
    checked. Raises: DataError where the file cannot be read.
    """
    try:
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(path))
            readers = {spec.name: _Reader(stack.enter_context(archive.open(f"{spec.name}.npy"))) for spec in inputs}
            total = next(iter(readers.values())).rows
            step = max(1, BLOCK_BYTES // max(1, *(reader.row_bytes for reader in readers.values())))
            for start in range(0, total, step):
                count = min(step, total - start)
                yield {name: reader.take(count) for name, reader in readers.items()}
            for reader in readers.values():
                reader.finish()
    except DataError:
        raise
    except (*_BROKEN, KeyError) as error:
        raise unreadable(path, "npz", error) from error


class _Reader:
    """One array of the archive, read from front to back."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._shape, fortran, self._dtype = _read_header(stream)
        self.rows = self._shape[0]
        self.row_bytes = int(np.prod(self._shape[1:], dtype=np.int64)) * self._dtype.itemsize
        self._whole: Array | None = None
        self._taken = 0
        if fortran:
            flat = np.frombuffer(self._read(self.rows * self.row_bytes), dtype=self._dtype)
            self._whole = np.ascontiguousarray(flat.reshape(self._shape, order="F"))

    def take(self, count: int) -> Array:
        """The next `count` rows."""
        start, self._taken = self._taken, self._taken + count
        if self._whole is not None:
            return self._whole[start : self._taken]
        return np.frombuffer(self._read(count * self.row_bytes), dtype=self._dtype).reshape(count, *self._shape[1:])

    def finish(self) -> None:
        """Reads to the end, so that the archive's checksum is checked. Raises: ValueError where bytes are left over."""
        if self._stream.read(1):
            raise ValueError("an array is longer than its header says")

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise ValueError("an array is shorter than its header says")
        return data


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Shape, whether in Fortran order, dtype. Raises: ValueError where the stream is no array."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"an array has format version {version}")
