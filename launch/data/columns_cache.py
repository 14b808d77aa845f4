"""Cache of columns as memory-mapped .npy files, created once on each node, keyed by the content of
their source.

A folder of the cache contains `0000.npy`, ... and `columns.json`. It is created under a file lock,
written to a temporary folder and renamed, so that the ranks of a node create it once and none of
them sees a partial one.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from trainload.capture.program import InputSpec
from trainload.core.atomic import new_folder, remove_temporaries
from trainload.core.canonical_json import canonical_json, parse_canonical, sha256_bytes
from trainload.core.errors import DataError, MissingDataError, StorageError
from trainload.launching.data.columns import Array
from trainload.launching.data.data_files import DataFile
from trainload.launching.node.cache import make_room, use
from trainload.packaging.tensors.safetensors_file import TensorSpec

_VERSION = 1
"""Part of the key. Increase it when the files made from the same source change."""


@dataclass(frozen=True, slots=True)
class CachedColumns:
    """Columns on disk.

    Attributes:
        fingerprint: SHA-256 of names, dtypes, shapes and values.
        rows: number of rows.
        files: input name -> .npy file of shape (rows, *dims).
    """

    fingerprint: str
    rows: int
    files: Mapping[str, Path]


def make_cached(
    cache_dir: Path,
    files: Sequence[DataFile],
    inputs: Sequence[InputSpec],
    make: Callable[[], tuple[int, Iterable[Mapping[str, Array]]]],
) -> CachedColumns:
    """Return the columns of a dataset from the cache, after calling `make` and writing them if they
    are not in it.

    Args:
        cache_dir: data folder of the node's cache.
        files: files of the dataset.
        inputs: inputs that are columns.
        make: returns the number of rows, and the rows in order, in blocks: input name -> (n, *dims)
            array of the input's dtype.

    Raises:
        StorageError: the columns do not fit the cache, which cannot be written or whose disk is
            full, and nothing is left behind; or a file's URL cannot be reached.
        DataError: a file does not exist any more, or an error of `make`.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir / "digests.lock"):
            identities = [_identity(file, cache_dir) for file in files]
        key = sha256_bytes(
            canonical_json(
                [
                    _VERSION,
                    identities,
                    [[spec.name, spec.dtype, list(spec.shape)] for spec in inputs],
                ]
            )
        )
        with FileLock(cache_dir / f"{key}.lock"):
            folder = cache_dir / key
            use(folder)
            cached = _read_cached(folder)
            if cached is not None:
                return cached
            remove_temporaries(folder)
            shutil.rmtree(folder, ignore_errors=True)  # incomplete, or changed
            rows, blocks = make()
            make_room(cache_dir.parent, _size_of(rows, inputs), "the data set")
            with new_folder(folder) as temporary:
                _convert(temporary, [spec.name for spec in inputs], rows, blocks)
            created = _read_cached(folder)
            assert created is not None
            return created
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            "the disk is full" if full else "the cache of data columns cannot be written",
            where=str(cache_dir),
            expected="room for the data set, uncompressed" if full else "a writable folder",
            got=str(error),
            hint="Free some disk space or choose another cache folder.",
        ) from error


def _size_of(rows: int, inputs: Sequence[InputSpec]) -> int:
    """Return the bytes of columns: at least, if dims are not known before the rows are read."""
    known = [(rows, *(dim for dim in spec.shape[1:] if isinstance(dim, int))) for spec in inputs]
    return sum(
        TensorSpec(spec.name, spec.dtype, shape).nbytes
        for spec, shape in zip(inputs, known, strict=True)
    )


def _identity(file: DataFile, cache_dir: Path) -> str:
    try:
        return file.identity(cache_dir)
    except FileNotFoundError as error:
        raise MissingDataError(
            "a file of the data set no longer exists", where=file.name
        ) from error


class _Column:
    """Sequential writer of a .npy file.

    With plain writes instead of a memory mapping, a full disk is an error and not a SIGBUS, and the
    digest needs no second pass.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self._rows = path, rows
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._dims: tuple[int, ...] | None = None
        self._dtype = ""
        self._written = 0

    def append(self, values: Array) -> None:
        if self._dims is None:
            self._dims, self._dtype = values.shape[1:], values.dtype.name
            header = {
                "descr": np.lib.format.dtype_to_descr(values.dtype),
                "fortran_order": False,
                "shape": (self._rows, *self._dims),
            }
            np.lib.format.write_array_header_1_0(self._file, header)
        assert (values.shape[1:], values.dtype.name) == (self._dims, self._dtype)
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self._file.write(data)
        self._digest.update(data)
        self._written += len(values)

    def finish(self) -> dict[str, object]:
        """Close the file, and return its entry in `columns.json`."""
        self.close()
        if self._written != self._rows or self._dims is None:
            raise DataError(
                "the data changed while it was being read",
                expected=f"{self._rows} rows",
                got=str(self._written),
            )
        shape = [self._rows, *self._dims]
        return {"dtype": self._dtype, "shape": shape, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self._file.close()


def _convert(
    folder: Path, names: Sequence[str], rows: int, blocks: Iterable[Mapping[str, Array]]
) -> None:
    columns: dict[str, _Column] = {}
    try:
        for number, name in enumerate(names):
            columns[name] = _Column(folder / f"{number:04}.npy", rows)
        for block in blocks:
            for name, column in columns.items():
                column.append(block[name])
        content = {name: column.finish() for name, column in columns.items()}
    finally:
        for column in columns.values():
            column.close()
    files = {
        name: {"file": column.path.name, "size": column.path.stat().st_size}
        for name, column in columns.items()
    }
    record = {"fingerprint": sha256_bytes(canonical_json(content)), "rows": rows, "columns": files}
    (folder / "columns.json").write_bytes(canonical_json(record))


def _read_cached(folder: Path) -> CachedColumns | None:
    """Return the columns in a folder of the cache; None if it does not exist, or a file does not
    have its recorded size.
    """
    index = folder / "columns.json"
    if not index.is_file():
        return None
    record = parse_canonical(index.read_bytes(), str(index))
    files: dict[str, Path] = {}
    for name, entry in record["columns"].items():
        path = folder / entry["file"]
        if not path.is_file() or path.stat().st_size != entry["size"]:
            return None
        files[name] = path
    return CachedColumns(record["fingerprint"], record["rows"], files)
