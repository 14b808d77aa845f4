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
        name: its path or URL. identity: its sha256, or what a URL's file system says of its version; "": it could not be read.
        size: bytes. rows: of it.
        problem: why it cannot be trained on; "": it can.
    """

    name: Words
    identity: Words
    size: int
    rows: int
    problem: Words = ""


class Snapshot(Record):
    """The data of a tick.

    Attributes:
        files: that are trained on, and those that were left out since they are bad.
        held_out: those that champion and challenger are compared on; () where a share of `files` is held out.
        rows: that are trained on. held_out_rows: that are held out.
        slices: value -> held-out rows that have it.
        statistics: of the columns that are trained on.
        made: whether rows were chosen, and written anew into the tick's folder.
        first, stop: of a window by column: seconds since 1970, the first one of it, and the first one after it.
        empty: why there is nothing new to train on; refused: why the data is not trained on. "": there is, and it is.
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
        """The files that are trained on."""
        return tuple(file for file in self.files if not file.problem)
