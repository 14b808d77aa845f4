"""Select the files of a tick."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from trainload.core.errors import DataError, MissingDataError, RequestError
from trainload.launching.data.data_files import DataFile, list_files
from trainload.launching.data.dataset import READERS
from trainload.retraining.config.config import Config

_TIME = re.compile(r"\{time:([^{}]*)\}")
_STEPS = {
    "Y": timedelta(days=366),
    "m": timedelta(days=31),
    "d": timedelta(days=1),
    "j": timedelta(days=1),
    "H": timedelta(hours=1),
    "M": timedelta(minutes=1),
}
"""Directives of a time in a path -> maximum time between two of their values."""
_MOST_PATHS = 100_000
TABLES = (".parquet", ".arrow", ".feather")
"""Suffixes of the formats whose rows can be selected by a column's values."""


def check_window(config: Config) -> None:
    """Check that a window fits the files that it selects from.

    Raises:
        RequestError: it does not fit; names the key and what is allowed.
    """
    files, window = config.data.files, config.data.window
    for text in files:
        if window.kind == "path":
            _form(text)
        elif _TIME.search(text):
            raise RequestError(
                "a path with a time requires a window of kind path", where="data.files", got=text
            )
        if text.endswith(".json"):
            raise RequestError(
                "a retraining's data must be files, not a mixture", where="data.files", got=text
            )
    if config.evaluation.files is not None and any(
        text.endswith(".json") for text in config.evaluation.files
    ):
        raise RequestError(
            "held-out data must be files, not a mixture",
            where="evaluation.files",
            got=", ".join(config.evaluation.files),
        )


def files_of(config: Config, scheduled: datetime) -> tuple[DataFile, ...]:
    """Return the files of a tick's window, in order.

    With a window of the kind "new", files that earlier ticks have used are included.

    Args:
        config: configuration of the retraining.
        scheduled: scheduled time of the tick.

    Raises:
        MissingDataError: there are no files.
        StorageError: a URL cannot be reached.
    """
    data = config.data
    if data.window.kind != "path":
        return list_files(data.files, READERS)
    assert data.window.span is not None, "a window by path has one"
    files: dict[str, DataFile] = {}
    for text in data.files:
        for path in _paths(text, scheduled - data.window.span, scheduled):
            try:
                files |= {file.name: file for file in list_files(path, READERS)}
            except MissingDataError:
                continue  # nothing was written at that time
    if not files:
        raise MissingDataError(
            "there is no data for this time",
            where=", ".join(data.files),
            expected=f"data of the {data.window.span} up to {scheduled}",
        )
    return tuple(files.values())


def one_format(files: Sequence[DataFile]) -> None:
    """Raise DataError if the files have several formats, or an unknown one."""
    kinds = {READERS.get(file.suffix) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise DataError(
            "all files of a tick must have the same format",
            where=files[0].name,
            expected="names that all end in one of " + ", ".join(READERS),
            got=", ".join(sorted({file.suffix or "no ending" for file in files})),
        )


def _form(text: str) -> str:
    """Return the time format in a path.

    Raises RequestError if there is not exactly one valid format.
    """
    matches = _TIME.findall(text)
    if len(matches) != 1:
        raise RequestError(
            "a window of kind path needs exactly one time in the path",
            where="data.files",
            expected="such as data/{time:%Y/%m/%d}/*.parquet",
            got=text,
        )
    directives = re.findall(r"%(.)", matches[0])
    unknown = [each for each in directives if each not in _STEPS]
    if unknown or not directives:
        allowed = ", ".join(f"%{each}" for each in _STEPS)
        raise RequestError(
            "this is not a time format",
            where="data.files",
            expected=f"some of {allowed}",
            got=matches[0],
        )
    return str(matches[0])


def _paths(text: str, start: datetime, stop: datetime) -> list[str]:
    """Return a path for each time in [start, stop), at the resolution of its time format."""
    form = _form(text)
    step = min(_STEPS[each] for each in re.findall(r"%(.)", form))
    step = min(step, timedelta(days=1))  # months and years are found by their days
    if (stop - start) / step > _MOST_PATHS:
        raise RequestError(
            "the window has too many paths",
            where="data.window.span",
            expected=f"at most {_MOST_PATHS} of {form}",
        )
    paths: dict[str, None] = {}
    at = _floor(start.astimezone(UTC), step)
    while at < stop:
        paths[_TIME.sub(at.strftime(form).replace("\\", r"\\"), text)] = None
        at += step
    return list(paths)


def _floor(moment: datetime, step: timedelta) -> datetime:
    """Round a time down to the beginning of a day, an hour or a minute."""
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return day + (moment - day) // step * step
