"""Take the snapshot of a tick's data: find its files, check them, and compute statistics of their
values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from trainload.capture.program import InputSpec
from trainload.core.atomic import replace_file
from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import DataError, MissingDataError
from trainload.core.suggestions import did_you_mean
from trainload.launching.data.columns import FileSchema, Sizes, check_file
from trainload.launching.data.data_files import DataFile, find_files, list_files
from trainload.launching.data.dataset import READERS
from trainload.launching.node.cache import default_cache_dir
from trainload.packaging.format.entries import data_specs
from trainload.retraining.config.config import Config
from trainload.retraining.data.drift import ColumnStatistics, Sampled
from trainload.retraining.data.row_selection import (
    HELD,
    TRAIN,
    RowFiles,
    TimeWindow,
    check_tables,
    chosen_rows,
    extra_columns,
)
from trainload.retraining.data.snapshot_records import LONGEST_WORDS, FileOf, Snapshot
from trainload.retraining.data.windows import TABLES, files_of, one_format

if TYPE_CHECKING:
    from trainload.packaging.package import Package


def take(
    config: Config,
    scheduled: datetime,
    package: Package,
    used_files: Collection[tuple[str, str]],
    folder: Path,
) -> Snapshot:
    """Take the snapshot of a tick's data.

    Args:
        config: configuration of the retraining.
        scheduled: scheduled time of the tick.
        package: package that is trained.
        used_files: names and identities of files that earlier ticks have used. With a window of the
            kind "new" they are left out.
        folder: folder of the tick, into which selected rows are written.

    Raises:
        RequestError: the files' format does not support the configuration.
        StorageError: a URL cannot be reached, or the folder cannot be written.
    """
    nothing = Snapshot(
        files=(), held_out=(), rows=0, held_out_rows=0, slices={}, statistics={}, made=False
    )
    try:
        files = files_of(config, scheduled)
    except MissingDataError as error:
        return nothing.model_copy(update={"empty": _truncate(f"no new data: {error}")})
    identities = {file.name: _identity_or_none(file) for file in files}
    if config.data.window.kind == "new":
        files = tuple(
            file for file in files if (file.name, identities[file.name]) not in used_files
        )
    if not files:
        return nothing.model_copy(
            update={
                "empty": _truncate(
                    f"no new data: all files in {', '.join(config.data.files)} were in earlier"
                    " ticks"
                )
            }
        )
    specs = data_specs(package.manifest, "")
    inspection = _make_inspection(config, specs, len(files), _window(config, scheduled))
    records = tuple(inspection.at(file, identities[file.name]) for file in files)
    snapshot = nothing.model_copy(update={"files": records, "statistics": inspection.statistics})
    refused = _refusal(config, files, records)
    held_out: tuple[FileOf, ...] = ()
    if config.evaluation.files is not None:
        held_out, problem = _held_out(config, specs)
        refused = refused or problem
    snapshot = snapshot.model_copy(update={"held_out": held_out})
    if refused:
        return snapshot.model_copy(update={"refused": _truncate(refused)})
    window = _window(config, scheduled)
    if window is not None:
        snapshot = snapshot.model_copy(update={"first": window.first, "stop": window.stop})
    try:
        return _count_rows(config, snapshot, folder)
    except DataError as error:
        return snapshot.model_copy(update={"refused": _truncate(" ".join(str(error).split()))})


def newest(
    config: Config, scheduled: datetime, package: Package, most: int
) -> tuple[int, tuple[FileOf, ...]]:
    """Inspect the latest files of a window, whether or not an earlier tick has used them.

    Args:
        config: configuration of the retraining.
        scheduled: end of the window.
        package: package that is trained.
        most: maximum number of files that are inspected.

    Returns:
        The number of files in the window, and the records of the latest ones.

    Raises:
        RequestError: the files' format does not support selecting rows.
        DataError: there are no files, they have several formats, or the held-out files cannot be
            used.
        StorageError: a URL cannot be reached.
    """
    files = files_of(config, scheduled)
    one_format(files)
    specs = data_specs(package.manifest, "")
    if config.evaluation.files is not None and (problem := _held_out(config, specs)[1]):
        raise DataError(problem, where="evaluation.files")
    check_tables(config, files)
    last = files[-most:]
    look = _make_inspection(config, specs, len(last), _window(config, scheduled))
    return len(files), tuple(look.at(file, "") for file in last)


def train_source(config: Config, snapshot: Snapshot, folder: Path) -> str:
    """Return the training data for a run of a tick; write it if it does not exist."""
    return _source(config, snapshot, folder, TRAIN)


def evaluation_source(config: Config, snapshot: Snapshot, folder: Path) -> str:
    """Return the held-out data for a run of a tick; write it if it does not exist."""
    return _source(config, snapshot, folder, HELD)


def check_evaluable(config: Config, snapshot: Snapshot, folder: Path) -> None:
    """Check that the held-out rows are those that the tick has read.

    The errors are those of `check_unchanged`.
    """
    if not snapshot.made:
        _check_same(snapshot.held_out)
    elif not RowFiles(config, snapshot, _place(snapshot, folder)).there():
        # they will be written again
        check_unchanged(snapshot)


def check_unchanged(snapshot: Snapshot) -> None:
    """Check that the files are those that the tick has read.

    Raises:
        DataError: a file has changed, or does not exist any more.
    """
    _check_same((*snapshot.good, *snapshot.held_out))


def _check_same(files: Sequence[FileOf]) -> None:
    for record in files:
        (file,) = _find_recorded(record)
        identity = _identity(file)
        if identity != record.identity:
            raise DataError(
                "a file of the tick's data has changed since it was inspected",
                where=record.name,
                expected=record.identity,
                got=identity,
                hint="Restore it, and write new data to new files.",
            )


def _find_recorded(record: FileOf) -> tuple[DataFile, ...]:
    try:
        return find_files(record.name, READERS)
    except MissingDataError as error:
        raise DataError(
            "a file of the tick's data no longer exists",
            where=record.name,
            expected=record.identity,
            hint="Restore it.",
        ) from error


def _identity(file: DataFile) -> str:
    cache = default_cache_dir() / "data"
    cache.mkdir(parents=True, exist_ok=True)
    return file.identity(cache)


def _identity_or_none(file: DataFile) -> str:
    """Return a file's identity; "" if it cannot be read, which is reported when the file is
    inspected.
    """
    try:
        return _identity(file)
    except OSError:
        return ""


def _truncate(text: str) -> str:
    return text[:LONGEST_WORDS]


def _window(config: Config, scheduled: datetime) -> TimeWindow | None:
    """Return the window of a tick's rows; None if rows are not selected by a column."""
    window = config.data.window
    if window.column is None or window.span is None:
        return None
    return TimeWindow(window.column, (scheduled - window.span).timestamp(), scheduled.timestamp())


def _make_inspection(
    config: Config, specs: Sequence[InputSpec], files: int, window: TimeWindow | None
) -> _Inspection:
    return _Inspection(
        specs,
        extra_columns(config, held=config.evaluation.hold_out is not None),
        config.data.inspect_rows,
        files,
        window,
    )


class _Inspection:
    """An inspector of files, one after another: checks that they fit, and collects statistics of
    their values.
    """

    def __init__(
        self,
        specs: Sequence[InputSpec],
        extra: Collection[str],
        rows: int,
        files: int,
        window: TimeWindow | None = None,
    ) -> None:
        self._specs, self._extra, self._window = specs, extra, window
        self._each = max(1, -(-rows // files))
        self._sizes = Sizes(specs)
        self._samples = {spec.name: Sampled(spec.dtype) for spec in specs}

    @property
    def statistics(self) -> dict[str, ColumnStatistics]:
        """Statistics of the files that fit."""
        return {name: sampled.statistics() for name, sampled in self._samples.items()}

    def at(self, file: DataFile, identity: str) -> FileOf:
        """Inspect a file, and return its record."""
        sizes, samples = copy.deepcopy(self._sizes), copy.deepcopy(self._samples)
        size, rows, problem = 0, 0, ""
        try:
            with file.opened() as stream:
                size = stream.seek(0, 2)
            schema = READERS[file.suffix].read_schema(file) if file.suffix in READERS else None
            if schema is None:
                raise DataError(
                    "no reader supports this file name",
                    where=file.name,
                    expected=", ".join(READERS),
                )
            rows = schema.rows
            self._check(schema, sizes)
            problem = self._values(file, sizes, samples) if rows else ""
        except DataError as error:
            problem = _truncate(" ".join(str(error).split()))
        except (OSError, pa.ArrowException) as error:
            problem = _truncate(f"{file.name} cannot be read: {' '.join(str(error).split())}")
            # it may be readable later, and counts as new then
            identity = "" if isinstance(error, OSError) else identity
        if not problem:
            self._sizes, self._samples = sizes, samples
        return FileOf(name=file.name, identity=identity, size=size, rows=rows, problem=problem)

    def _check(self, schema: FileSchema, sizes: Sizes) -> None:
        lacking = sorted(set(self._extra) - set(schema.columns))
        if lacking and schema.columns:
            raise DataError(
                f"the data has no column {lacking[0]!r}",
                where=schema.name,
                got=", ".join(sorted(schema.columns)),
                hint=did_you_mean(lacking[0], schema.columns),
            )
        inputs = {
            name: column for name, column in schema.columns.items() if name not in self._extra
        }
        if schema.rows or schema.columns:
            check_file(FileSchema(schema.name, schema.rows, inputs), self._specs, sizes)

    def _values(self, file: DataFile, sizes: Sizes, samples: dict[str, Sampled]) -> str:
        """Inspect the first rows of a file that are in the window; return a problem with them, or
        "".
        """
        in_window = (
            None if self._window is None or file.suffix not in TABLES else self._window.rows(file)
        )
        start = inspected = 0
        for block in READERS[file.suffix].read_blocks(file, self._specs, sizes):
            rows = len(next(iter(block.values())))
            numbers = (
                np.arange(rows)
                if in_window is None
                else np.flatnonzero(in_window[start : start + rows])
            )
            numbers = numbers[: self._each - inspected]
            for name, values in block.items():
                part = values[: len(numbers)] if in_window is None else values[numbers]
                if part.dtype.kind == "f" and not np.isfinite(part).all():
                    broken = ~np.isfinite(part.reshape(len(part), -1)).all(axis=1)
                    row = start + int(numbers[np.flatnonzero(broken)[0]])
                    return (
                        f"{file.name}, column {name!r}: {int(broken.sum())} rows hold NaN or"
                        f" infinity, the first is row {row}"
                    )
                samples[name].add(part)
            start, inspected = start + rows, inspected + len(numbers)
            if inspected >= self._each:
                break
        return ""


def _refusal(config: Config, files: Sequence[DataFile], records: Sequence[FileOf]) -> str:
    """Return the reason to refuse a tick's data; "" if there is none."""
    try:
        one_format(files)
    except DataError as error:
        return str(error)
    bad = [file for file in records if file.problem]
    if not bad or (config.data.bad == "skip" and len(bad) < len(records)):
        return ""
    return f"{len(bad)} of {len(records)} files are bad: {bad[0].problem}"


def _held_out(config: Config, specs: Sequence[InputSpec]) -> tuple[tuple[FileOf, ...], str]:
    """Return the records of the held-out files, and the reason why they cannot be used, or ""."""
    assert config.evaluation.files is not None, "else a share of the rows is"
    try:
        files = list_files(config.evaluation.files, READERS)
    except MissingDataError as error:
        return (), f"there is no held-out data: {error}"
    inspection = _Inspection(
        specs, extra_columns(config, held=True, trained=False), config.data.inspect_rows, len(files)
    )
    records = tuple(inspection.at(file, _identity_or_none(file)) for file in files)
    bad = [file for file in records if file.problem]
    return records, _truncate(f"the held-out data is bad: {bad[0].problem}") if bad else ""


def _count_rows(config: Config, snapshot: Snapshot, folder: Path) -> Snapshot:
    """Return the snapshot with its numbers of rows, after writing selected rows."""
    if chosen_rows(config):
        counts = RowFiles(config, snapshot, _place(snapshot, folder)).write()
        held_out = {name: rows for name, rows in counts.items() if name != TRAIN}
        slices = {name: rows for name, rows in held_out.items() if name != HELD}
        changed = {
            "rows": counts.get(TRAIN, 0),
            "held_out_rows": sum(held_out.values()),
            "slices": slices,
            "made": True,
        }
    else:
        changed = {
            "rows": sum(file.rows for file in snapshot.good),
            "held_out_rows": sum(file.rows for file in snapshot.held_out),
        }
    snapshot = snapshot.model_copy(update=changed)
    least = config.data.least_rows
    if snapshot.rows < least:
        return snapshot.model_copy(
            update={"empty": f"no new data: {snapshot.rows} rows, but a tick needs {least}"}
        )
    if not snapshot.held_out_rows:
        return snapshot.model_copy(
            update={"empty": f"no new data: none of {snapshot.rows} rows is held out"}
        )
    return snapshot


def _place(snapshot: Snapshot, folder: Path) -> Path:
    """Return the folder for a snapshot's data within that of a tick.

    It depends on the files, so that a process that was paused, and has seen other files, uses
    another folder.
    """
    files = [
        [(file.name, file.identity) for file in each] for each in (snapshot.good, snapshot.held_out)
    ]
    return (
        folder / f"data-{sha256_bytes(canonical_json([files, snapshot.first, snapshot.stop]))[:16]}"
    )


def _source(config: Config, snapshot: Snapshot, folder: Path, which: str) -> str:
    folder = _place(snapshot, folder)
    if snapshot.made:
        files = RowFiles(config, snapshot, folder)
        if not files.there():
            files.write()
        return files.source(which)
    listed = snapshot.good if which == TRAIN else snapshot.held_out
    path = folder / f"{which}.json"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"parts": [{"data": [file.name for file in listed]}]}).encode())
    return str(path)
