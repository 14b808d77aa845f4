"""Data that is not in files: rows of a Python function or a Ray dataset are written into the run's
folder before the run begins.

So workers need neither of them, all nodes have the same rows, and a resumed run has the rows that
it began with.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import parse_qsl

import pyarrow as pa

from trainload.core.credentials import resolve
from trainload.core.errors import DataError, JobError, StorageError, TrainloadError
from trainload.core.storage.interface import StoreFiles, send_file
from trainload.core.suggestions import did_you_mean
from trainload.core.user_code import describe, functions_of, load_module, user_line
from trainload.launching.data.arrow_file import Batch, write_rows
from trainload.launching.run.run_directory import RUN_FILE, missing_folders, remove_empty
from trainload.launching.run.run_place import files_of, place_name
from trainload.launching.run.run_spec import made_file, made_path

PYTHON = "python:"
_REFERENCE_FORM = (
    "python:path/to/file.py:name or python:package.module:name, with ?argument=value&... if it"
    " takes arguments"
)


class RayDataset(Protocol):
    """The part of ray.data.Dataset's interface that is used."""

    def iter_batches(self, *, batch_size: None, batch_format: str) -> Iterable[Mapping[str, Any]]:
        """Return an iterable over its rows in batches."""


Rows: TypeAlias = Iterable[Batch] | Batch | RayDataset
Data: TypeAlias = str | Path | Callable[[], Rows] | RayDataset
"""A run's data: files (`data_files.Source`) or a mixture; python:FILE.py:NAME; a function that
returns rows; a ray.data.Dataset.
"""


Name: TypeAlias = Literal["data", "eval_data"]


@dataclass(frozen=True, slots=True)
class InFiles:
    """Files of a run's data and held-out data; those that are made exist once `written` has been
    entered.

    Attributes:
        data: files of the data.
        eval_data: files of the held-out data; None if there is none.
        made: descriptions of the sources of data that is not in files.
        sources: sources of its rows.
    """

    data: str | Path
    eval_data: str | Path | None
    made: dict[Name, str] = field(default_factory=dict)
    sources: dict[Name, Data] = field(default_factory=dict)


def in_files(data: Data, eval_data: Data | None, run_dir: Path, *, alone: bool = True) -> InFiles:
    """Return the files of a run's data, including those that are yet to be written by `written`.

    Args:
        data: data of the run.
        eval_data: held-out data of the run.
        run_dir: the run's folder.
        alone: True if no other process launches this run, too.

    Raises:
        DataError: an argument is not data, or must be written although several processes launch the
            run and each would write it.
    """
    data_by_name: dict[Name, Data] = (
        {"data": data} if eval_data is None else {"data": data, "eval_data": eval_data}
    )
    sources = {name: each for name, each in data_by_name.items() if _must_be_written(each)}
    descriptions = {name: _describe_source(each) for name, each in sources.items()}
    if descriptions and not alone:
        raise DataError(
            "data from a function requires a single launching process, but torchrun starts one per"
            " rank",
            where=", ".join(descriptions.values()),
            hint="Write the rows to a file first, with trainload.write_rows.",
        )
    files = {
        name: f"{place_name(run_dir)}/{made_path(name)}" if name in sources else _check_path(each)
        for name, each in data_by_name.items()
    }
    return InFiles(files["data"], files.get("eval_data"), descriptions, sources)


@contextmanager
def written(data: InFiles, run_dir: Path) -> Iterator[None]:
    """Write data that is not in files into the run's folder; remove it at the end if the run was
    not created in the context.

    Raises:
        DataError: a function does not exist, fails, or does not return rows.
        StorageError: the folder cannot be written.
    """
    folder = made_file(run_dir, "data").parent
    new_folders = missing_folders(folder)
    files = files_of(run_dir) if data.sources else None
    try:
        for name, source in data.sources.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(
                    f"the run's folder cannot be written: {error.strerror}", where=str(folder)
                ) from error
            write_rows(_read_batches(source, data.made[name]), made_file(run_dir, name))
        if files is not None:
            _send(files, run_dir, data.sources)
        yield
    finally:
        if data.sources and not (run_dir / RUN_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            remove_empty(new_folders)
            # another process may have created the run
            if files is not None and files.size(RUN_FILE) is None:
                for name in data.sources:
                    files.delete(made_path(name))


def _send(files: StoreFiles, run_dir: Path, names: Iterable[Name]) -> None:
    """Send data from a working copy to the URL of its run, where all nodes read it."""
    for name in names:
        send_file(files, made_path(name), made_file(run_dir, name))


def _check_path(data: Data) -> str | Path:
    if isinstance(data, str | Path):
        return data
    raise DataError(
        "this is not a data source",
        expected=f"a path, a URL, {_REFERENCE_FORM}, a function, or a ray.data.Dataset",
        got=type(data).__name__,
        hint=(
            "For rows in memory, pass a function that returns them, or write them to a file with"
            " trainload.write_rows."
        ),
    )


def _must_be_written(data: Data) -> bool:
    return (
        data.startswith(PYTHON)
        if isinstance(data, str)
        else _is_ray_dataset(data) or inspect.isroutine(data)
    )


def _is_ray_dataset(data: object) -> bool:
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(data, module.Dataset)


def _describe_source(data: Data) -> str:
    """Return the description of a source that the run records."""
    if isinstance(data, str):
        return data
    if _is_ray_dataset(data):
        return "a Ray data set"
    return f"the function {getattr(data, '__module__', '?')}.{getattr(data, '__qualname__', '?')}"


def _read_batches(data: Data, name: str) -> Iterator[Batch]:
    """Yield the rows of a source. Raises DataError for an error in a function or dataset."""
    module: ModuleType | str = name
    try:
        if isinstance(data, str):
            module, function = _load_function(data)
            rows: Any = function()
        else:
            rows = data if _is_ray_dataset(data) else data()  # type: ignore[operator]  # it is a function then
        if _is_ray_dataset(rows):
            rows = rows.iter_batches(batch_size=None, batch_format="numpy")
        elif isinstance(rows, Mapping | pa.Table | pa.RecordBatch):
            rows = (rows,)
        if not isinstance(rows, Iterable):
            raise DataError(
                "the function does not return rows",
                where=name,
                expected="batches of rows",
                got=type(rows).__name__,
            )
        yield from rows
    except TrainloadError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"the data source failed: {describe(error)}",
            where=f"{name} ({user_line(error, module)})",
        ) from error


def _load_function(reference: str) -> tuple[ModuleType, Callable[[], Any]]:
    """Return the module of a referenced function, and the function with its arguments bound."""
    target, _, query = reference.removeprefix(PYTHON).partition("?")
    location, _, name = target.rpartition(":")
    if not location or not name.isidentifier():
        raise DataError("this does not name a function", where=reference, expected=_REFERENCE_FORM)
    try:
        module = load_module(location)
    except JobError as error:
        raise DataError(
            error.problem, where=f"{reference} ({error.where})", expected=_REFERENCE_FORM
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(
            f"there is no function {name!r} in it",
            where=location,
            hint=did_you_mean(name, functions_of(module)),
        )
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        arguments = {key: resolve(value) for key, value in pairs}
        if len(arguments) < len(pairs):
            raise TypeError("an argument is given twice")
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        expected = f"{name}{inspect.signature(function)}, all of them strings"
        raise DataError(
            f"the function does not take these arguments: {error}",
            where=reference,
            expected=expected,
        ) from error
    return module, lambda: function(**arguments)
