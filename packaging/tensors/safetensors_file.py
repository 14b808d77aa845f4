"""The safetensors format: validated headers, and bytes that do not depend on the order of writing.

Specification: https://huggingface.co/docs/safetensors. A file consists of the header's length (8
bytes, little endian), the header (JSON), and the tensors' bytes without holes.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import IntegrityError, PackageError

CODES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a dtype -> its name in safetensors."""
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in CODES}
NAMES: Mapping[str, str] = {code: name for name, code in CODES.items()}
"""Name of a dtype in safetensors -> torch's name."""
MAX_HEADER = 64 * 2**20
_LARGE = 4 * 2**20
"""Bytes from which memory uses huge pages: one page fault per 2 MiB instead of one per 4 KiB."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: bytes [start, stop) of its file. `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a file is to contain."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes.

        Raises:
            PackageError: the dtype is not supported in packages.
        """
        if self.dtype not in DTYPES:
            raise PackageError(
                "a tensor has a dtype that packages do not support",
                where=self.name,
                expected=", ".join(sorted(DTYPES)),
                got=self.dtype,
            )
        size = DTYPES[self.dtype].itemsize
        for length in self.shape:
            size *= length
        return size


class TensorFileWriter:
    """Writer of one safetensors file whose tensors may be added in any order.

    A context manager; leaving it syncs the file to disk. Law: the bytes depend on the specs and the
    tensors, not on the order of `add`.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        # Wider dtypes first, so that every tensor is aligned.
        ordered = sorted(
            specs,
            key=lambda spec: (-DTYPES[spec.dtype].itemsize if spec.nbytes >= 0 else 0, spec.name),
        )
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for spec in ordered:
            header[spec.name] = {
                "dtype": CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        text = canonical_json(header)
        text += b" " * (-len(text) % 8)
        self.path = path
        self.places: dict[str, Place] = {}
        start = 8 + len(text)
        for spec in ordered:
            self.places[spec.name] = Place(spec.dtype, spec.shape, start, start + spec.nbytes)
            start += spec.nbytes
        self._missing = set(self.places)
        self._file: BinaryIO = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor.

        Raises:
            PackageError: the tensor is not one of the specs, occurs twice, or has another dtype or
                shape.
            OSError: the disk is full.
        """
        if name not in self._missing:
            raise PackageError(
                "a tensor was added twice"
                if name in self.places
                else "the package has no such tensor",
                where=name,
            )
        place = self.places[name]
        got = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if got != (place.dtype, place.shape):
            raise PackageError(
                "a tensor has the wrong dtype or shape",
                where=name,
                expected=f"{place.dtype} {place.shape}",
                got=f"{got[0]} {got[1]}",
            )
        if tensor.device.type == "meta":
            raise PackageError(
                "a tensor has no data",
                where=name,
                got="a meta tensor",
                hint="Pass the real tensor.",
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.seek(place.start)
        self._file.write(memoryview(flat.view(torch.uint8).numpy().data))
        self._missing.remove(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if self._missing:
                    raise PackageError(
                        "tensors are missing",
                        where=self.path.name,
                        got=", ".join(sorted(self._missing)[:5]),
                    )
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a complete file.

    Raises:
        PackageError: a dtype is not supported in packages.
        OSError: the disk is full.
    """
    specs = [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    ]
    with TensorFileWriter(path, specs) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)


def parse_header(
    head: bytes, size: int, where: str, expected: Iterable[TensorSpec]
) -> dict[str, Place]:
    """Parse a header that may be hostile, and check it against the manifest.

    Args:
        head: the file's first bytes, at least the header.
        size: size of the file in bytes.
        where: the file's name, for errors.
        expected: exactly the tensors that the file must contain.

    Raises:
        IntegrityError: the header is malformed, has holes or overlaps, or lists other tensors.
    """
    length = header_length(head, size, where)
    entries = parse_canonical(
        head[8 : 8 + length].rstrip(b" "), where, max_bytes=MAX_HEADER, max_depth=4
    )
    if not isinstance(entries, dict) or entries.pop("__metadata__", {"format": "pt"}) != {
        "format": "pt"
    }:
        raise IntegrityError("a tensor file's header is malformed", where=where)
    specs = {spec.name: spec for spec in expected}
    if set(entries) != set(specs):
        raise IntegrityError(
            "the tensors of a file do not match the manifest",
            where=where,
            got=", ".join(sorted(set(entries) ^ set(specs))[:5]),
        )
    places: dict[str, Place] = {}
    for name, entry in entries.items():
        spec = specs[name]
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise IntegrityError("a tensor file's header is malformed", where=f"{where}, {name}")
        if (
            not _whole_numbers(entry["shape"])
            or not _whole_numbers(entry["data_offsets"])
            or len(entry["data_offsets"]) != 2
        ):
            raise IntegrityError("a tensor file's header is malformed", where=f"{where}, {name}")
        begin, end = entry["data_offsets"]
        described = (NAMES.get(str(entry["dtype"])), entry["shape"])
        if described != (spec.dtype, list(spec.shape)) or end != begin + spec.nbytes:
            raise IntegrityError(
                "a tensor's dtype or shape does not match the manifest",
                where=f"{where}, {name}",
                expected=f"{spec.dtype} {spec.shape}",
                got=str(described),
            )
        places[name] = Place(spec.dtype, spec.shape, 8 + length + begin, 8 + length + end)
    at = 8 + length
    for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
        if place.start != at:
            raise IntegrityError("tensors overlap or leave a gap", where=where)
        at = place.stop
    if at != size:
        raise IntegrityError(
            "a tensor file's length does not match its header",
            where=where,
            expected=str(at),
            got=str(size),
        )
    return places


def _whole_numbers(value: object) -> bool:
    """Return True for a list of integers.

    8.0 and True do not count, although they equal 8 and 1 in Python.
    """
    return isinstance(value, list) and all(type(each) is int for each in value)


def header_length(head: bytes, size: int, where: str) -> int:
    """Return the header length that the first 8 bytes state.

    Raises:
        IntegrityError: the length is impossible.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > MAX_HEADER or 8 + length > size:
        raise IntegrityError(
            "a tensor file states an impossible header length", where=where, got=str(length)
        )
    return length


def tensor_of(
    data: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor that copies raw bytes."""
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    bytes_of(tensor)[:] = memoryview(data)
    return tensor


def to_fill(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised contiguous CPU tensor of `shape` and `dtype`."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # without huge pages in the kernel, only filling is slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return (
        memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        if tensor.numel()
        else memoryview(bytearray())
    )


def tensor_places(data: bytes, where: str, specs: Iterable[TensorSpec]) -> dict[str, Place]:
    """Return the places of the tensors of a complete file.

    Raises:
        IntegrityError: the file is malformed or contains other tensors than `specs`.
    """
    length = header_length(data[:8], len(data), where)
    return parse_header(data[: 8 + length], len(data), where, specs)


def read_tensors(data: bytes, where: str, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return the tensors of a complete file, each with its own memory.

    Raises:
        IntegrityError: as `tensor_places`.
    """
    places = tensor_places(data, where, specs)
    view = memoryview(data)
    return {
        name: tensor_of(view[place.start : place.stop], place.dtype, place.shape)
        for name, place in places.items()
    }
