"""A data set: files on disk -> batches of exactly the inputs that a package declares."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from trainload.capture.errors import DataError, MissingDataError
from trainload.capture.program import InputSpec
from trainload.launch.data import columns_npz, columns_parquet
from trainload.launch.data.columns import DTYPES, Array, FileSchema, Sizes, check_file, check_inputs
from trainload.launch.data.columns_cache import CachedColumns, make_cached
from trainload.launch.data.sampler import Rows

Source = str | Path | Sequence[str | Path]
"""A .parquet or .npz file, a folder of them, a glob pattern, or several of these. The files of a folder or pattern are taken in
the order of their names; several sources in the order given."""

_READERS: dict[str, ModuleType] = {".parquet": columns_parquet, ".npz": columns_npz}


class Dataset:
    """Rows on disk, mapped into memory.

    Attributes:
        size: number of rows, at least 1.
        fingerprint: sha256 of names, dtypes, shapes and values: the same rows in other files have the same one.
    """

    __slots__ = ("_columns", "fingerprint", "size")

    def __init__(self, cached: CachedColumns) -> None:
        self.size = cached.rows
        self.fingerprint = cached.fingerprint
        self._columns: dict[str, Array] = {name: np.load(path, mmap_mode="r") for name, path in cached.files.items()}

    def batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The given rows, in this order.

        Args:
            rows: (n,) int64, each in [0, size).
        Returns: input name -> (n, *dims) tensor of the declared dtype, on CPU, owning its memory.
        Raises: IndexError for a row that the data set does not have.
        """
        if rows.size and int(rows.min()) < 0:
            raise IndexError(f"row {int(rows.min())} of a data set of {self.size} rows")
        return {name: torch.from_numpy(np.asarray(np.take(column, rows, axis=0))) for name, column in self._columns.items()}


def open_dataset(source: Source, inputs: Sequence[InputSpec], cache_dir: Path) -> Dataset:
    """Opens a data set for a package's inputs, converting it once per node into `cache_dir`.

    An input's leading dim is the rows; other sizes are ints, or symbols that stand for one length in all rows.
    Raises: DataError where the source is missing, empty or unreadable, or does not fit the inputs: a missing or extra column,
    another dtype (nothing is cast), other lengths, nulls. StorageError where the cache cannot be written.
    """
    schemas, sizes = _checked(source, inputs)

    def blocks() -> Iterator[dict[str, Array]]:
        return chain.from_iterable(
            _READERS[schema.path.suffix].read_blocks(schema.path, inputs, sizes) for schema in schemas if schema.rows
        )

    rows = sum(schema.rows for schema in schemas)
    return Dataset(make_cached(cache_dir, [schema.path for schema in schemas], inputs, rows, blocks()))


def check_schema(source: Source, inputs: Sequence[InputSpec]) -> int:
    """Compares a source with a package's inputs by the files' metadata alone, before anything starts.

    Returns: the number of rows. Raises: DataError as `open_dataset`, but for nulls and unequal lists, which the values tell.
    """
    schemas, _ = _checked(source, inputs)
    return sum(schema.rows for schema in schemas)


def source_columns(source: Source) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each column's dtype, and the lengths of a row's dims, by the metadata and the first row of the first file that has rows.

    Raises: DataError as `open_dataset`, where the source is missing, empty or unreadable.
    """
    for path in find_files(source):
        schema: FileSchema = _READERS[path.suffix].read_schema(path)
        if schema.rows:
            unknown = [name for name, column in schema.columns.items() if None in column.dims]
            told = _READERS[path.suffix].first_row(path, unknown) if unknown else {}
            return {
                name: (column.dtype, told[name] if name in told else tuple(d for d in column.dims if d is not None))
                for name, column in schema.columns.items()
            }
    raise _empty(source)


def find_files(source: Source) -> tuple[Path, ...]:
    """The files that a source names. Raises: DataError where there are none, of two kinds, or one of them twice."""
    parts = [source] if isinstance(source, (str, Path)) else list(source)
    files = [file for part in parts for file in _files_of(part)]
    if not files:
        raise _no_files(source)
    kinds = sorted({file.suffix for file in files})
    if len(kinds) > 1 or kinds[0] not in _READERS:
        raise DataError(
            "a data set's files are all Parquet or all npz",
            where=_spelled(source),
            expected="names that all end in .parquet, or all in .npz",
            got=", ".join(kind or "no ending" for kind in kinds),
            cure="Convert the files or name some of them only.",
        )
    twice = sorted({str(file) for file in files if files.count(file) > 1}) if len(set(files)) < len(files) else []
    if twice:
        raise DataError("a file is named twice", where=_spelled(source), got=", ".join(twice), cure="Name it once.")
    return tuple(files)


def _files_of(part: str | Path) -> list[Path]:
    path = Path(part)
    if path.is_dir():
        # Names with a leading dot or underscore are other programs' marks and drafts.
        return sorted(file for file in path.iterdir() if file.suffix in _READERS and not file.name.startswith((".", "_")))
    if path.is_file():
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(part), recursive=True)) if glob.has_magic(str(part)) else []
    if not found:
        raise _no_files(part)
    return found


def _no_files(source: Source) -> MissingDataError:
    return MissingDataError(
        "there is no such data",
        where=_spelled(source),
        expected="a .parquet or .npz file, a folder that holds some, or a pattern that matches some",
        got="no file",
        cure="Check the path; relative ones start at the current folder.",
    )


def _empty(source: Source) -> DataError:
    return DataError("the data set is empty", where=_spelled(source), expected="at least one row", got="0 rows")


def _spelled(source: Source) -> str:
    return str(source) if isinstance(source, (str, Path)) else ", ".join(str(part) for part in source)


def _checked(source: Source, inputs: Sequence[InputSpec]) -> tuple[list[FileSchema], Sizes]:
    check_inputs(inputs)
    sizes = Sizes(inputs)
    schemas: list[FileSchema] = []
    for path in find_files(source):
        schema: FileSchema = _READERS[path.suffix].read_schema(path)
        check_file(schema, inputs, sizes)
        schemas.append(schema)
    if not sum(schema.rows for schema in schemas):
        raise _empty(source)
    assert all(spec.dtype in DTYPES for spec in inputs)
    return schemas, sizes
