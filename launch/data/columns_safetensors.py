"""Reader of safetensors files: one tensor for each input, rows along the leading dim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import BinaryIO

import numpy as np

from trainload.capture.program import InputSpec
from trainload.core.canonical_json import parse_json
from trainload.core.errors import DataError, IntegrityError
from trainload.launching.data.columns import (
    BLOCK_BYTES,
    Array,
    ColumnType,
    FileSchema,
    Sizes,
    one_length,
    unreadable,
)
from trainload.launching.data.data_files import DataFile
from trainload.packaging.tensors.safetensors_file import CODES, DTYPES, Place, header_length

_DTYPE_NAMES = {code: name for name, code in CODES.items()}


def read_schema(file: DataFile) -> FileSchema:
    """Read the schema from the header alone (see `Reader`)."""
    with _open_tensors(file) as (_, places):
        scalars = [name for name, place in places.items() if not place.shape]
        if scalars:
            raise DataError(
                "a tensor has no rows",
                where=f"{file.name}, tensor {scalars[0]!r}",
                expected="a leading dim",
                got="shape ()",
            )
        rows = one_length({name: place.shape[0] for name, place in places.items()}, file.name)
        return FileSchema(
            file.name,
            rows,
            {name: ColumnType(place.dtype, place.shape[1:]) for name, place in places.items()},
        )


def first_row(file: DataFile) -> Mapping[str, ColumnType] | None:
    """Return the columns if there are rows (see `Reader`)."""
    schema = read_schema(file)
    return schema.columns if schema.rows else None


def read_blocks(
    file: DataFile, inputs: Sequence[InputSpec], sizes: Sizes
) -> Iterator[dict[str, Array]]:
    """Yield blocks of rows (see `Reader`)."""
    with _open_tensors(file) as (stream, all_places):
        places = {spec.name: all_places[spec.name] for spec in inputs}
        total = next(iter(places.values())).shape[0]
        step = max(1, BLOCK_BYTES // max(1, *(_row_bytes(place) for place in places.values())))
        for start in range(0, total, step):
            yield {
                name: _read_rows(stream, place, start, min(step, total - start))
                for name, place in places.items()
            }


def _read_rows(stream: BinaryIO, place: Place, start: int, count: int) -> Array:
    size = _row_bytes(place)
    stream.seek(place.start + start * size)
    data = stream.read(count * size)
    if len(data) != count * size:
        raise ValueError("the file ends inside a tensor")
    return np.frombuffer(data, dtype=place.dtype).reshape(count, *place.shape[1:])


def _row_bytes(place: Place) -> int:
    return prod(place.shape[1:]) * DTYPES[place.dtype].itemsize


@contextmanager
def _open_tensors(file: DataFile) -> Iterator[tuple[BinaryIO, dict[str, Place]]]:
    """Yield the opened file, and the places of its tensors in it."""
    try:
        with file.opened() as stream:
            yield stream, _read_places(stream, file.name)
    except DataError:
        raise
    except (IntegrityError, ValueError, KeyError, TypeError, OSError) as error:
        raise unreadable(file, "a safetensors file", error) from error


def _read_places(stream: BinaryIO, where: str) -> dict[str, Place]:
    """Parse the header, and check that the places of its tensors are inside the file."""
    size = stream.seek(0, 2)
    stream.seek(0)
    head = stream.read(8)
    length = header_length(head, size, where)
    entries = parse_json(stream.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    entries.pop("__metadata__", None)
    places: dict[str, Place] = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        dtype, shape = _DTYPE_NAMES[entry["dtype"]], tuple(int(each) for each in entry["shape"])
        if (
            min((0, *shape)) < 0
            or end - begin != prod(shape) * DTYPES[dtype].itemsize
            or not 0 <= begin <= end <= size - 8 - length
        ):
            raise ValueError(f"tensor {name!r} is not where the header says")
        places[name] = Place(dtype, shape, 8 + length + begin, 8 + length + end)
    return places
