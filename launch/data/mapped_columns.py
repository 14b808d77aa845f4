"""Columns of a saved dataset of Hugging Face datasets, read where they are: its Arrow streams are
mapped into memory, and not converted.

Only plain values can be read this way. The folder must not change while a run uses it, as
`datasets` itself requires; its content is compared when a run opens it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from filelock import FileLock

from trainload.capture.program import InputSpec
from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.launching.data.arrow_values import dense
from trainload.launching.data.columns import Array, Sizes, unreadable
from trainload.launching.data.columns_arrow import FILE_MAGIC
from trainload.launching.data.data_files import DataFile, LocalFile
from trainload.launching.data.sampler import Rows
from trainload.launching.data.saved_datasets import STATE


class MappedColumn:
    """A column in parts, each a view of a mapped file.

    Args:
        parts: arrays (n, *dims) of one dtype and one shape of rows, each with a row or more.
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = parts
        self._starts = np.cumsum([0, *(len(part) for part in parts)])

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, *dims)."""
        return (int(self._starts[-1]), *self._parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the values."""
        return self._parts[0].dtype

    def digest(self) -> str:
        """Return the SHA-256 of all values."""
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def take(self, rows: Rows) -> Array:
        """Return rows in the given order, in memory of their own.

        Raises:
            IndexError: there is no such row.
        """
        if rows.size and int(rows.max()) >= self.shape[0]:
            raise IndexError(f"row {int(rows.max())} is out of range: there are {self.shape[0]}")
        taken = np.empty((rows.size, *self.shape[1:]), self.dtype)
        homes = np.searchsorted(self._starts, rows, side="right") - 1
        for home in np.unique(homes):
            at = np.flatnonzero(homes == home)
            taken[at] = self._parts[home][rows[at] - self._starts[home]]
        return taken


@dataclass(frozen=True, slots=True)
class MappedColumns:
    """Columns of a dataset.

    Attributes:
        fingerprint: SHA-256 of names, dtypes, shapes and values, as in `CachedColumns`.
        rows: number of rows.
        columns: input name -> column.
    """

    fingerprint: str
    rows: int
    columns: Mapping[str, MappedColumn]


def is_saved(files: Sequence[DataFile]) -> bool:
    """Return True if files are those of a saved dataset on this machine."""
    return all(
        isinstance(file, LocalFile) and (file.path.parent / STATE).is_file() for file in files
    )


def map_columns(
    cache_dir: Path, files: Sequence[DataFile], inputs: Sequence[InputSpec], sizes: Sizes
) -> MappedColumns | None:
    """Map the files of a saved dataset; None if values are not in the files as they are: booleans,
    encoded or compressed ones.

    Args:
        cache_dir: data folder of the node's cache, which keeps fingerprints.
        files: files of a saved dataset with a row or more, which fit the inputs by their schemas.
        inputs: inputs that are columns.
        sizes: declared lengths, to which those of the rows are compared.

    Raises:
        DataError: there are nulls, or a row does not have the declared lengths.
        OSError: a file or the cache cannot be read.
    """
    parts: dict[str, list[Array]] = {spec.name: [] for spec in inputs}
    for file in files:
        try:
            if not isinstance(file, LocalFile) or not _map_file(file.path, parts, sizes):
                return None
        except pa.ArrowException as error:
            raise unreadable(file, "a stream of Arrow batches", error) from error
    columns = {name: MappedColumn(arrays) for name, arrays in parts.items()}
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / "digests.lock"):
        key = canonical_json(
            [
                "mapped",
                [file.identity(cache_dir) for file in files],
                [[spec.name, spec.dtype, list(spec.shape)] for spec in inputs],
            ]
        )
        record = cache_dir / "digests" / sha256_bytes(key)
        if not record.is_file():
            record.parent.mkdir(exist_ok=True)
            replace_file(record, _fingerprint(columns).encode("ascii"), durable=False)
        fingerprint = record.read_text("ascii")
    return MappedColumns(fingerprint, next(iter(columns.values())).shape[0], columns)


def _map_file(path: Path, parts: Mapping[str, list[Array]], sizes: Sizes) -> bool:
    """Add a file's arrays to the parts of each column; return False if one is not a view of it."""
    whole = pa.memory_map(str(path)).read_buffer()
    if whole[: len(FILE_MAGIC)].to_pybytes() == FILE_MAGIC:
        return False
    low, high = whole.address, whole.address + whole.size
    start = 0
    with pa.ipc.open_stream(pa.BufferReader(whole)) as opened:
        for batch in opened:
            for name, arrays in parts.items() if batch.num_rows else ():
                array = dense(batch, name, str(path), start, sizes)
                if not low <= array.__array_interface__["data"][0] < high:
                    return False
                arrays.append(array)
            start += batch.num_rows
    return True


def _fingerprint(columns: Mapping[str, MappedColumn]) -> str:
    """Return the fingerprint of columns, in the form of `columns_cache`."""
    content = {
        name: {"dtype": column.dtype.name, "shape": list(column.shape), "sha256": column.digest()}
        for name, column in columns.items()
    }
    return sha256_bytes(canonical_json(content))
