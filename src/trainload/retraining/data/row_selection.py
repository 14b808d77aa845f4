"""Select rows from a tick's files: by the time in a column, held-out rows, slices.

The selection is deterministic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trainload.core.atomic import publish, replace_file, temporary_beside
from trainload.core.errors import DataError, RequestError, StorageError
from trainload.launching.data.columns_arrow import record_batches
from trainload.launching.data.data_files import DataFile, find_files
from trainload.launching.data.dataset import READERS
from trainload.retraining.config.config import Config
from trainload.retraining.data.windows import TABLES

if TYPE_CHECKING:
    from trainload.retraining.data.snapshot_records import FileOf, Snapshot

Bools = npt.NDArray[np.bool_]

TRAIN, HELD, OTHER = "train", "held-out", "other"
_MOST_SLICES = 64
_BATCH = 65_536
_COUNTS_FILE = "rows.json"
_LONGEST_SLICE, _DIGEST = 128, 16
"""Maximum length of a slice's name, which is also a name in a mixture, and length of the digest at
the end of a longer one.
"""
_TICKS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Unit of an Arrow timestamp -> number of units in a second."""


def chosen_rows(config: Config) -> bool:
    """Return True if rows are selected, so that files cannot be used directly."""
    window, evaluation = config.data.window, config.evaluation
    return bool(
        window.kind == "column"
        or config.data.drop
        or evaluation.hold_out is not None
        or evaluation.slices is not None
    )


def extra_columns(config: Config, *, held: bool, trained: bool = True) -> tuple[str, ...]:
    """Return the columns that files must have although they are not inputs.

    Args:
        config: configuration of the retraining.
        held: True for files with held-out rows, to include the column of slices.
        trained: True for files with training rows, to include the column of the window.
    """
    columns = [*config.data.drop]
    if trained and config.data.window.column is not None:
        columns.append(config.data.window.column)
    if held and config.evaluation.slices is not None:
        columns.append(config.evaluation.slices.column)
    return tuple(dict.fromkeys(columns))


def judged_slices(config: Config, slice_names: Collection[str]) -> list[str]:
    """Return the slices with a requirement: those of `evaluation.slices.values`, or else all of
    `slice_names`.
    """
    slices = config.evaluation.slices
    if slices is None or slices.values is None:
        return sorted(slice_names)
    return sorted({_slice(slices.column, value, None) for value in slices.values})


def check_tables(config: Config, files: Sequence[DataFile]) -> None:
    """Raise RequestError if the configuration selects rows, and a file's format does not support
    that.
    """
    other = next((file for file in files if file.suffix not in TABLES), None)
    if other is not None and chosen_rows(config):
        raise RequestError(
            "rows can only be selected from files in certain formats",
            where=other.name,
            expected=", ".join(TABLES),
            got=other.suffix,
            hint=(
                "Write such files, or omit window.column, data.drop, evaluation.hold_out and"
                " evaluation.slices."
            ),
        )


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The rows whose `column` is in [first, stop), in seconds since 1970."""

    column: str
    first: float
    stop: float

    def holds(self, batch: Any, file: DataFile) -> Bools:
        """Return a mask of the batch's rows in the window.

        Raises DataError if the column is not a time, or has nulls.
        """
        seconds = _seconds(batch.column(self.column), f"{file.name}, column {self.column!r}")
        inside: Bools = (seconds >= self.first) & (seconds < self.stop)
        return inside

    def rows(self, file: DataFile) -> Bools:
        """Return a mask of the file's rows in the window. The errors are those of `holds`."""
        masks = [self.holds(batch, file) for batch in _batches(file, (self.column,))]
        return np.concatenate(masks) if masks else np.zeros(0, dtype=bool)


class RowFiles:
    """Files with the rows that a tick has selected.

    Args:
        config: configuration of the retraining.
        snapshot: snapshot of the tick, with its files and its window.
        folder: folder for the files.
    """

    def __init__(self, config: Config, snapshot: Snapshot, folder: Path) -> None:
        self._config, self._snapshot, self._folder = config, snapshot, folder

    def there(self) -> bool:
        """Return True if the files were written."""
        return (self._folder / _COUNTS_FILE).is_file()

    def write(self) -> dict[str, int]:
        """Write the files; return the numbers of training rows, of held-out rows without a slice,
        and of rows of each slice.

        Raises:
            RequestError: the format of the data does not support selecting rows.
            DataError: a column by which rows are selected has invalid values.
            StorageError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                writers = _Writers(self._folder, stack)
                for file in self._snapshot.good:
                    self._divide(file, writers, held=False)
                for file in self._snapshot.held_out:
                    self._divide(file, writers, held=True)
                counts = writers.close()
            replace_file(self._folder / _COUNTS_FILE, json.dumps(counts, sort_keys=True).encode())
        except OSError as error:
            raise StorageError(
                f"the tick's rows cannot be written: {error.strerror or error}",
                where=str(self._folder),
            ) from error
        return counts

    def source(self, which: str) -> str:
        """Return the data for a run: a file of rows, or a mixture with a part for each slice.

        `which` is `TRAIN` or `HELD`.
        """
        counts: dict[str, int] = json.loads((self._folder / _COUNTS_FILE).read_bytes())
        if which == TRAIN:
            return str(self._folder / _file(TRAIN))
        slices = sorted(name for name in counts if name not in (TRAIN, HELD))
        if not slices:
            return str(self._folder / _file(HELD))
        path = self._folder / f"{HELD}.json"
        replace_file(
            path,
            json.dumps(
                {"parts": [{"data": _file(name), "name": name} for name in slices]}
            ).encode(),
        )
        return str(path)

    def _divide(self, record: FileOf, writers: _Writers, *, held: bool) -> None:
        """Distribute the rows of one file to the writers."""
        (file,) = find_files(record.name, READERS)
        check_tables(self._config, (file,))
        start = 0
        for batch in _read(file):
            numbers = np.arange(start, start + batch.num_rows, dtype=np.uint64)
            start += batch.num_rows
            in_window = (
                np.ones(batch.num_rows, dtype=bool) if held else self._in_window(batch, file)
            )
            share = self._config.evaluation.hold_out
            held_out = (
                np.ones(batch.num_rows, dtype=bool)
                if held
                else _held_out(record.identity, numbers, share or 0.0)
            )
            if not held:
                writers.add(
                    TRAIN,
                    self._without_extra_columns(batch, held=False),
                    in_window & ~held_out,
                    file.name,
                )
            if held or share is not None:
                self._add_held_out(batch, in_window & held_out, writers, file)

    def _add_held_out(self, batch: Any, rows: Bools, writers: _Writers, file: DataFile) -> None:
        slices = self._config.evaluation.slices
        inputs = self._without_extra_columns(batch, held=True)
        if slices is None:
            writers.add(HELD, inputs, rows, file.name)
            return
        values = batch.column(slices.column).to_pylist()
        listed = None if slices.values is None else {str(value) for value in slices.values}
        names = np.array([_slice(slices.column, value, listed) for value in values], dtype=object)
        for name in sorted(set(names[rows])):
            writers.add(name, inputs, rows & (names == name), file.name)
        if writers.slices > _MOST_SLICES + 1:
            raise DataError(
                "the column of the slices has too many distinct values",
                where=f"{file.name}, column {slices.column!r}",
                expected=f"at most {_MOST_SLICES}",
                hint="List some of them in evaluation.slices.values; the others form one slice.",
            )

    def _without_extra_columns(self, batch: Any, *, held: bool) -> Any:
        """Return a batch without columns that are not inputs."""
        extra = {*extra_columns(self._config, held=True), *extra_columns(self._config, held=held)}
        return batch.select([name for name in batch.schema.names if name not in extra])

    def _in_window(self, batch: Any, file: DataFile) -> Bools:
        column = self._config.data.window.column
        if column is None:
            return np.ones(batch.num_rows, dtype=bool)
        first, stop = self._snapshot.first, self._snapshot.stop
        assert first is not None, "a window by column has a first moment"
        assert stop is not None, "a window by column has an end"
        return TimeWindow(column, first, stop).holds(batch, file)


class _Writers:
    """Writers of Arrow files, by the name of their rows.

    The files are renamed when all of them are complete.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._open: dict[str, Any] = {}
        self._temporary: dict[str, Path] = {}
        self._schemas: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        stack.callback(self._discard)

    @property
    def slices(self) -> int:
        """Number of slices."""
        return len(self._counts.keys() - {TRAIN, HELD})

    def add(self, name: str, batch: Any, rows: Bools, where: str) -> None:
        """Write the masked rows of a batch.

        `where` is their source file. Raises DataError, as `_cast_to_schema` does.
        """
        if not rows.any():
            return
        part = batch.filter(pa.array(rows))
        if name not in self._open:
            self._schemas[name] = pa.schema(
                [pa.field(field.name, field.type) for field in part.schema]
            )
            self._temporary[name] = temporary_beside(self._folder / _file(name))
            self._open[name] = self._stack.enter_context(
                pa.ipc.new_file(str(self._temporary[name]), self._schemas[name])
            )
        self._open[name].write_batch(_cast_to_schema(part, self._schemas[name], where))
        self._counts[name] = self._counts.get(name, 0) + part.num_rows

    def close(self) -> dict[str, int]:
        """Close and rename the files; return name -> number of rows."""
        for writer in self._open.values():
            writer.close()
        for name, temporary in self._temporary.items():
            publish(temporary, self._folder / _file(name))
        return dict(sorted(self._counts.items()))

    def _discard(self) -> None:
        for temporary in self._temporary.values():
            temporary.unlink(missing_ok=True)


def _file(name: str) -> str:
    """Return the file name for training rows, held-out rows, or a slice, whose name is hashed."""
    plain = name in (TRAIN, HELD)
    return (
        f"{name}.arrow"
        if plain
        else f"slice-{hashlib.sha256(name.encode()).hexdigest()[:16]}.arrow"
    )


def _slice(column: str, value: object, listed: set[str] | None) -> str:
    """Return the name of a slice.

    If it is too long for a mixture's part, it ends in a digest, so that names are unique.
    """
    text = str(value)
    name = f"{column}={OTHER}" if listed is not None and text not in listed else f"{column}={text}"
    if len(name) <= _LONGEST_SLICE:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    return f"{name[: _LONGEST_SLICE - _DIGEST - 1]}#{digest}"


def _cast_to_schema(batch: Any, schema: Any, where: str) -> Any:
    """Return a batch with the column order and types of the first batch.

    Raises DataError if values would change.
    """
    try:
        columns = [batch.column(field.name).cast(field.type) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    except (KeyError, pa.ArrowException) as error:
        raise DataError(
            "a file's columns differ from those of the previous files",
            where=where,
            expected=", ".join(f"{field.name}: {field.type}" for field in schema),
            got=", ".join(f"{field.name}: {field.type}" for field in batch.schema),
        ) from error


def _read(file: DataFile) -> Iterator[Any]:
    """Yield the record batches of a table, with all columns.

    Raises DataError if it cannot be read.
    """
    try:
        yield from _batches(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"a file cannot be read: {' '.join(str(error).split())}", where=file.name
        ) from error


def _batches(file: DataFile, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the record batches of a table, with at least the given columns, or with all of them."""
    if file.suffix == ".parquet":
        with file.opened() as stream, pq.ParquetFile(stream, pre_buffer=False) as opened:
            yield from opened.iter_batches(
                batch_size=_BATCH, columns=None if columns is None else list(columns)
            )
        return
    with record_batches(file) as (_, batches):
        yield from batches


def _held_out(identity: str, numbers: npt.NDArray[np.uint64], share: float) -> Bools:
    """Return a mask of a file's held-out rows, from a hash of the file and the row number: the same
    in every attempt.
    """
    seed = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    with np.errstate(over="ignore"):  # splitmix64 (Steele, Lea, Flood 2014) computes modulo 2**64
        mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    mask: Bools = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53 < share
    return mask


def _seconds(column: Any, where: str) -> npt.NDArray[np.float64]:
    """Convert a time column to seconds since 1970; times without a zone are in UTC.

    Raises DataError if the column is not a time, or has nulls.
    """
    if column.null_count:
        raise DataError(
            "the time column contains nulls", where=where, hint="Fill them in or drop the rows."
        )
    kind = column.type
    if pa.types.is_timestamp(kind):
        ticks: npt.NDArray[np.int64] = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
        return ticks.astype(np.float64) / _TICKS[kind.unit]
    if pa.types.is_date(kind):
        return _seconds(column.cast(pa.timestamp("s")), where)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        seconds: npt.NDArray[np.float64] = column.to_numpy(zero_copy_only=False).astype(np.float64)
        return seconds
    raise DataError(
        "this is not a time column",
        where=where,
        expected="timestamps (UTC if they have no time zone), or seconds",
        got=str(kind),
    )
