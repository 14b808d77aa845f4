"""Safetensors files as a source of weights: a file, or a Hugging Face folder, at a path or URL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trainload.core.canonical_json import parse_json
from trainload.core.errors import WeightsError, printable
from trainload.packaging.tensors.safetensors_file import (
    DTYPES,
    MAX_HEADER,
    NAMES,
    Place,
    TensorSpec,
    bytes_of,
    to_fill,
)
from trainload.packaging.weight_sources.source_files import FileSource, described
from trainload.packaging.weight_sources.weight_source import SourceFile

_ENDING = ".safetensors"
_INDEX = "model.safetensors.index.json"
_FIRST = 2**16
"""Bytes of the first read of a file, which holds the header of most files."""
_BLOCK = 16 * 2**20
"""Bytes of one read."""


@dataclass(frozen=True, slots=True)
class _Header:
    """Header of a file: its tensors with their places, and the file's size."""

    places: dict[str, Place]
    size: int


class SafetensorsSource(FileSource):
    """`WeightSource` of safetensors files.

    Args:
        where: a .safetensors file, or a folder: with `model.safetensors.index.json`, or any files
            of this format, of which no two have the same tensor.
        known: the files as they were checked: a file that has changed since is rejected before a
            tensor of it is returned.

    Raises:
        WeightsError: there are no such files, or one is malformed.
        StorageError: the storage cannot be reached.
    """

    def __init__(self, where: str | Path, known: Sequence[SourceFile] = ()) -> None:
        path = str(where).rstrip("/")
        folder, _, last = path.rpartition("/")
        above = folder or ("/" if "/" in path else ".")
        is_file = last.endswith(_ENDING)
        super().__init__(path, above if is_file else path, known)
        self._single = last if is_file else None
        self._headers: dict[str, _Header] = {}

    @cached_property
    def _homes(self) -> dict[str, str]:
        """Tensor -> its file."""
        if self._single is not None:
            names = [self._single]
        elif (index := self._files.read(_INDEX, MAX_HEADER)) is not None:
            return self._indexed(index)
        else:
            names = [name for name in self._files.names("") if name.endswith(_ENDING)]
        if not names:
            raise WeightsError(
                "there are no weights",
                where=self._where,
                expected=f"a {_ENDING} file, or a folder with {_INDEX} or {_ENDING} files",
            )
        homes: dict[str, str] = {}
        for name in names:
            for tensor in self._header(name).places:
                if tensor in homes:
                    raise WeightsError(
                        f"two files have the tensor {printable(tensor)}",
                        where=self._where,
                        got=f"{homes[tensor]} and {name}",
                        hint="Name one file, or a folder with the files of one model.",
                    )
                homes[tensor] = name
        return homes

    def _indexed(self, index: bytes) -> dict[str, str]:
        """Return tensor -> file of an index, whose names stay within the folder."""
        homes = _parsed(index, f"{self._where}/{_INDEX}").get("weight_map")
        if not isinstance(homes, dict) or not all(
            isinstance(name, str)
            and name.endswith(_ENDING)
            and name.isprintable()
            and "/" not in name
            for name in homes.values()
        ):
            raise self._malformed(_INDEX, "no map of tensors to files beside it")
        for name in sorted(set(homes.values())):
            listed = {tensor for tensor, home in homes.items() if home == name}
            if missing := listed - self._header(name).places.keys():
                raise self._malformed(
                    name, f"without {printable(min(missing))}, which {_INDEX} lists"
                )
        return dict(homes)

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """See `WeightSource.tensors`."""
        return {
            tensor: TensorSpec(tensor, place.dtype, place.shape)
            for tensor, home in self._homes.items()
            for place in [self._header(home).places[tensor]]
        }

    def files(self, names: set[str]) -> tuple[SourceFile, ...]:
        """See `WeightSource.files`."""
        homes = sorted({self._homes[name] for name in names})
        return tuple(described(self._files, home, self._where) for home in homes)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource.slice`."""
        home = self._homes.get(name)
        if home is None:
            raise WeightsError(f"there is no {printable(name)} any more", where=self._where)
        self._unchanged.check(home)
        place = self._header(home).places[name]
        if not 0 <= start <= stop <= math.prod(place.shape):
            raise ValueError(f"elements {start} to {stop} are not within {name}, {place.shape}")
        dtype = DTYPES[place.dtype]
        tensor = to_fill((stop - start,), dtype)
        into, at = bytes_of(tensor), place.start + start * dtype.itemsize
        for low in range(0, len(into), _BLOCK):
            high = min(low + _BLOCK, len(into))
            into[low:high] = self._part(home, at + low, at + high)
        return tensor

    def _header(self, name: str) -> _Header:
        header = self._headers.get(name)
        if header is None:
            header = self._headers[name] = self._read_header(name)
        return header

    def _read_header(self, name: str) -> _Header:
        size = self._files.size(name)
        if size is None:
            raise WeightsError("a file of weights is missing", where=f"{self._where}, {name}")
        first = self._part(name, 0, min(size, _FIRST))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > MAX_HEADER or 8 + length > size:
            raise self._malformed(name, f"a header of {length:,} bytes in {size:,}")
        more = self._part(name, len(first), 8 + length) if 8 + length > len(first) else b""
        content = (first + more)[: 8 + length]
        entries = _parsed(content[8:], f"{self._where}, {name}")
        entries.pop("__metadata__", None)
        places = {
            tensor: self._place(name, tensor, entry, 8 + length, size)
            for tensor, entry in entries.items()
        }
        return _Header(places, size)

    def _place(self, name: str, tensor: str, entry: Any, begin: int, size: int) -> Place:
        """Return a tensor's place by its entry of the header of `begin` bytes."""
        try:
            code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, start, stop]
        except (TypeError, KeyError, ValueError):
            raise self._malformed(name, f"{printable(tensor)} without a place") from None
        if not isinstance(code, str) or any(type(n) is not int or n < 0 for n in numbers):
            raise self._malformed(name, f"{printable(tensor)} without a place")
        dtype = NAMES.get(code, code)
        length = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else stop - start
        if stop - start != length or begin + stop > size or length < 0:
            raise self._malformed(name, f"{printable(tensor)} of {stop - start:,} bytes")
        return Place(dtype, tuple(shape), begin + start, begin + stop)

    def _malformed(self, name: str, got: str | Exception) -> WeightsError:
        return WeightsError(
            "a file of weights is not in the safetensors format, or is not complete",
            where=f"{self._where}, {name}",
            got=str(got),
            hint="Fetch it again.",
        )


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        WeightsError: it is none.
    """
    try:
        found = parse_json(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise WeightsError("a file of weights is malformed", where=where, expected="a JSON object")
    return found
