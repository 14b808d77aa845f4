"""Reader of tar files in the WebDataset format: consecutive files with the same name up to the
first dot are a row.

    000017.tokens.npy  000017.cls        ->  row 000017 of columns tokens and cls

A file with the suffix .npy contains an array; a file with a suffix in `NUMBERS` contains an integer
as text.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from trainload.capture.program import InputSpec
from trainload.core.errors import DataError
from trainload.launching.data.columns import (
    BLOCK_BYTES,
    Array,
    ColumnType,
    FileSchema,
    Sizes,
    native,
    unreadable,
)
from trainload.launching.data.data_files import DataFile

NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
"""Suffixes that WebDataset decodes as integers."""
_MAX_MEMBER_BYTES = 1 << 30
"""Maximum size of a member."""

_Row = tuple[str, dict[str, tuple[str, tarfile.TarInfo]]]
"""Name of a row, and its columns: column -> (full suffix, member)."""


def read_schema(file: DataFile) -> FileSchema:
    """Read the schema from all members' headers and the values of the first row (see `Reader`)."""
    with _open_archive(file) as archive:
        columns: dict[str, ColumnType] = {}
        count = 0
        for count, (name, members) in enumerate(_read_rows(archive), 1):
            if count == 1:
                columns = _column_types(archive, members, file.name)
            elif members.keys() != columns.keys():
                raise _other_columns_error(file.name, name, columns, members)
        return FileSchema(file.name, count, columns)


def first_row(file: DataFile) -> Mapping[str, ColumnType] | None:
    """Return the columns of the first row (see `Reader`)."""
    with _open_archive(file) as archive:
        row = next(_read_rows(archive), None)
        return None if row is None else _column_types(archive, row[1], file.name)


def read_blocks(
    file: DataFile, inputs: Sequence[InputSpec], sizes: Sizes
) -> Iterator[dict[str, Array]]:
    """Yield blocks of rows (see `Reader`)."""
    specs = {spec.name: spec for spec in inputs}
    with _open_archive(file) as archive:
        block: list[dict[str, Array]] = []
        size = 0
        for name, members in _read_rows(archive):
            if specs.keys() - members.keys():
                raise _other_columns_error(file.name, name, specs, members)
            row = {
                column: _read_value(
                    archive, *members[column], f"{file.name}, {members[column][1].name}"
                )
                for column in specs
            }
            for column, value in row.items():
                _check_value(value, specs[column], sizes, f"{file.name}, {members[column][1].name}")
            block.append(row)
            size += sum(value.nbytes for value in row.values())
            if size >= BLOCK_BYTES:
                yield _stack_rows(block, list(specs))
                block, size = [], 0
        if block:
            yield _stack_rows(block, list(specs))


@contextmanager
def _open_archive(file: DataFile) -> Iterator[tarfile.TarFile]:
    try:
        with file.opened() as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            yield archive
    except DataError:
        raise
    except (tarfile.TarError, ValueError, EOFError, OSError) as error:
        raise unreadable(file, "a tar file", error) from error


def _read_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members in order.

    Raises EOFError if the archive's end marker is missing, since tarfile treats anything unreadable
    as the end.
    """
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all of them in memory
        yield member
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise EOFError(f"there is neither a member nor the archive's end at byte {archive.offset}")


def _read_rows(archive: tarfile.TarFile) -> Iterator[_Row]:
    """Yield the rows in order. Members that are not files, or are hidden, are skipped."""
    current: _Row | None = None
    for member in _read_members(archive):
        folder, slash, base = member.name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not member.isfile() or not stem:
            continue
        name, column = folder + slash + stem, _column_of(ending)
        if current is not None and current[0] != name:
            yield current
            current = None
        if current is None:
            current = (name, {})
        if column in current[1]:
            raise ValueError(f"row {name!r} has column {column!r} twice")
        current[1][column] = (ending, member)
    if current is not None:
        yield current


def _column_types(
    archive: tarfile.TarFile, members: Mapping[str, tuple[str, tarfile.TarInfo]], where: str
) -> dict[str, ColumnType]:
    types: dict[str, ColumnType] = {}
    for column, (ending, member) in members.items():
        if _is_known(ending):
            value = _read_value(archive, ending, member, f"{where}, {member.name}")
            types[column] = ColumnType(value.dtype.name, value.shape)
        else:
            types[column] = ColumnType(f"bytes of .{ending}", ())
    return types


def _column_of(ending: str) -> str:
    """Return the column of a suffix: the part before the format's suffix ("cls" for "cls", "tokens"
    for "tokens.npy").
    """
    return (ending.rpartition(".")[0] or ending) if _is_known(ending) else ending


def _is_known(ending: str) -> bool:
    return ending.rpartition(".")[2] in ("npy", *NUMBERS)


def _read_value(
    archive: tarfile.TarFile, ending: str, member: tarfile.TarInfo, where: str
) -> Array:
    """Read a member as an array of a row's shape."""
    if member.size > _MAX_MEMBER_BYTES:
        raise DataError(
            "a member is too large",
            where=where,
            expected=f"at most {_MAX_MEMBER_BYTES:,} bytes",
            got=f"{member.size:,}",
        )
    stream = archive.extractfile(member)
    assert stream is not None, "only files are members of rows"
    data = stream.read()
    if len(data) != member.size:
        raise EOFError(f"{member.name} is truncated")
    try:
        if ending.endswith("npy"):
            array: Array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            return native(array)
        return np.asarray(int(data), dtype=np.int64)
    except (ValueError, OverflowError) as error:
        expected = "an array" if ending.endswith("npy") else "a whole number of 64 bits"
        raise DataError(
            "a member cannot be read", where=where, expected=expected, got=str(error)
        ) from error


def _check_value(value: Array, spec: InputSpec, sizes: Sizes, where: str) -> None:
    """Raise DataError if a row's value does not fit its input."""
    if value.dtype.name != spec.dtype:
        raise DataError(
            f"input {spec.name!r} has the wrong dtype",
            where=where,
            expected=spec.dtype,
            got=value.dtype.name,
        )
    if value.ndim != len(spec.shape) - 1:
        dims = str(len(spec.shape) - 1)
        raise DataError(
            f"input {spec.name!r} has the wrong number of dims",
            where=where,
            expected=dims,
            got=str(value.ndim),
        )
    for dim, length in enumerate(value.shape, 1):
        sizes.expect(spec.name, dim, length, where)


def _stack_rows(rows: Sequence[Mapping[str, Array]], names: Sequence[str]) -> dict[str, Array]:
    return {name: np.stack([row[name] for row in rows]) for name in names}


def _other_columns_error(
    where: str, row: str, expected: Mapping[str, object], got: Mapping[str, object]
) -> DataError:
    return DataError(
        "a row has different columns than the previous rows",
        where=f"{where}, row {row!r}",
        expected=", ".join(sorted(expected)),
        got=", ".join(sorted(got)),
        hint="Write each row's files one after another, with the same suffixes for all rows.",
    )
