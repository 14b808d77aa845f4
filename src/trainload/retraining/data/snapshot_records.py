"""The record of a tick's data."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainload.core.records import Record
from trainload.retraining.data.drift import ColumnStatistics

LONGEST_WORDS = 8192
Words = Annotated[str, Field(max_length=LONGEST_WORDS)]


class FileOf(Record):
    """A file of a snapshot.

    Attributes:
        name: its path or URL.
        identity: its SHA-256, or a hash of its version in a URL's file system; "" if it could not
            be read.
        size: size in bytes.
        rows: number of rows.
        problem: reason why it cannot be used for training; "" if it can.
    """

    name: Words
    identity: Words
    size: int
    rows: int
    problem: Words = ""


class Snapshot(Record):
    """The data of a tick.

    Attributes:
        files: training files, including bad ones that are left out.
        held_out: files on which champion and challenger are compared; () if a fraction of `files`
            is held out.
        rows: number of training rows.
        held_out_rows: number of held-out rows.
        slices: slice -> number of its held-out rows.
        statistics: statistics of the training columns.
        made: True if rows were selected, and written into the tick's folder.
        first: beginning of a window by column, in seconds since 1970.
        stop: end of that window, which is excluded.
        empty: reason why there is no new data; "" if there is new data.
        refused: reason why the data is refused; "" if it is used.
    """

    files: Annotated[tuple[FileOf, ...], Field(max_length=100_000)]
    held_out: Annotated[tuple[FileOf, ...], Field(max_length=100_000)]
    rows: int
    held_out_rows: int
    slices: dict[str, int]
    statistics: dict[str, ColumnStatistics]
    made: bool
    first: float | None = None
    stop: float | None = None
    empty: Words = ""
    refused: Words = ""

    @property
    def good(self) -> tuple[FileOf, ...]:
        """Files that are used for training."""
        return tuple(file for file in self.files if not file.problem)
