"""Checkpoints of torch.distributed.checkpoint (DCP) as a source of weights.

Their metadata and the descriptions of their tensors are pickles. They are read here without the
classes that they name, so that nothing in them is called.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from trainload.core.errors import IntegrityError, WeightsError, printable
from trainload.core.storage.interface import StoreFiles
from trainload.packaging.tensors.safetensors_file import DTYPES, TensorSpec, bytes_of, to_fill
from trainload.packaging.weight_sources.source_files import bounded
from trainload.packaging.weight_sources.weight_source import SourceFile

METADATA = ".metadata"
_MAX_METADATA = 2**30
_BLOCK = 2**14
"""Bytes that are read of a file at least."""
_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": "float64",
        "Float": "float32",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
        "ComplexFloat": "complex64",
        "ComplexDouble": "complex128",
    }.items()
}
"""Class of a storage in a pickle -> dtype of its elements. Others are of bytes."""


class _Inert:
    """Stands for an object of any class: it keeps its arguments and its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        if isinstance(self.state, dict) and name in self.state:
            return self.state[name]
        raise AttributeError(name)


class _InertUnpickler(pickle.Unpickler):
    """Unpickler that imports nothing: classes and functions are replaced."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and (name in DTYPES or name.startswith("float8")):
            return name
        return type(name, (_Inert,), {"kind": name})

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage of torch's format: ("storage", class, key, device, elements)."""
        return _Inert(*pid)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a tensor: its place in the tensor, and in its file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """Elements of a chunk in its file: `start` is that of the first byte of the storage."""

    dtype: torch.dtype
    start: int
    offset: int
    strides: tuple[int, ...]


class DcpSource:
    """`WeightSource` of a checkpoint of torch.distributed.checkpoint.

    Args:
        where: folder of the checkpoint, at a path or URL.
        known: the files as they were checked.

    Raises:
        WeightsError: the checkpoint is malformed, or not the one that was checked.
        StorageError: the storage cannot be reached.
    """

    def __init__(self, where: str | Path, known: Sequence[SourceFile] = ()) -> None:
        self._where = str(where).rstrip("/")
        self._files: StoreFiles = bounded(self._where)
        self._known = {file.name: file for file in known}
        self._stored: dict[tuple[str, int], _Stored] = {}

    @property
    def where(self) -> str:
        """Path or URL of the checkpoint."""
        return self._where

    @cached_property
    def _described(self) -> tuple[SourceFile, dict[str, TensorSpec], dict[str, list[_Chunk]]]:
        """The file of metadata, and what it says of each tensor."""
        content = self._files.read(METADATA, _MAX_METADATA)
        if content is None:
            raise WeightsError(f"there is no {METADATA}", where=self._where)
        file = SourceFile(
            name=METADATA, size=len(content), state=f"sha256:{hashlib.sha256(content).hexdigest()}"
        )
        if self._known.get(METADATA, file) != file:
            raise WeightsError(
                "the checkpoint has changed since the run was launched",
                where=self._where,
                hint="Restore it, or launch a new run.",
            )
        try:
            return file, *_parsed(_InertUnpickler(io.BytesIO(content)).load())
        except (
            pickle.UnpicklingError,
            *(AttributeError, EOFError, ImportError, IndexError),
            *(KeyError, TypeError, ValueError, RecursionError, OverflowError, MemoryError),
        ) as error:
            raise self._malformed(METADATA, f"{type(error).__name__}: {error}") from error

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """See `WeightSource.tensors`."""
        return self._described[1]

    def files(self, _names: set[str]) -> tuple[SourceFile, ...]:
        """Return the metadata, which DCP writes last; see `WeightSource.files`."""
        return (self._described[0],)

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource.slice`."""
        spec = self.tensors[name]
        if not 0 <= start <= stop <= math.prod(spec.shape):
            raise ValueError(f"elements {start} to {stop} are not within {name}, {spec.shape}")
        found = to_fill((stop - start,), DTYPES[spec.dtype])
        filled = 0
        for chunk in self._described[2][name]:
            filled += self._fill(found, start, chunk, spec)
        if filled != stop - start:
            raise self._malformed(METADATA, f"{filled:,} of {stop - start:,} elements of {name}")
        return found

    def _fill(self, into: torch.Tensor, start: int, chunk: _Chunk, spec: TensorSpec) -> int:
        """Fill `into`, whose first element is `start` of the tensor, with what a chunk has of it.

        Returns the number of elements.
        """
        runs = [
            (low, high, at + low - begin)
            for begin, end, at in _runs(chunk, spec.shape)
            for low, high in [(max(begin, start), min(end, start + len(into)))]
            if low < high
        ]
        if not runs:
            return 0
        stored = self._find(chunk, spec)
        if stored.strides == _contiguous(chunk.sizes):
            first = runs[0][2]
            last = runs[-1][2] + runs[-1][1] - runs[-1][0]
            elements = self._elements(chunk, stored, stored.offset + first, last - first)
        else:
            first = 0
            reach = 1 + sum((n - 1) * s for n, s in zip(chunk.sizes, stored.strides, strict=True))
            memory = self._elements(chunk, stored, stored.offset, reach)
            elements = memory.as_strided(chunk.sizes, stored.strides).reshape(-1)
        for low, high, at in runs:
            into[low - start : high - start] = elements[at - first : at - first + high - low]
        return sum(high - low for low, high, _ in runs)

    def _elements(self, chunk: _Chunk, stored: _Stored, start: int, count: int) -> torch.Tensor:
        """Read elements [start, start + count) of a chunk's storage."""
        found = to_fill((count,), stored.dtype)
        begin = stored.start + start * stored.dtype.itemsize
        if begin + found.nbytes > chunk.start + chunk.length:
            raise self._malformed(chunk.file, "a tensor that is longer than its part")
        bytes_of(found)[:] = self._part(chunk.file, begin, begin + found.nbytes)
        return found

    def _find(self, chunk: _Chunk, spec: TensorSpec) -> _Stored:
        """Return where a chunk's elements are in its file, which has an archive by `torch.save`."""
        key = (chunk.file, chunk.start)
        if key not in self._stored:
            try:
                self._stored[key] = self._read_description(chunk)
            except (
                zipfile.BadZipFile,
                pickle.UnpicklingError,
                *(AttributeError, EOFError, ImportError, IndexError, KeyError, NotImplementedError),
                *(TypeError, ValueError, RecursionError, OverflowError, StopIteration),
            ) as error:
                raise self._malformed(chunk.file, f"{type(error).__name__}: {error}") from error
        stored = self._stored[key]
        if stored.dtype != DTYPES[spec.dtype]:
            raise self._malformed(chunk.file, f"a tensor of {stored.dtype}")
        return stored

    def _read_description(self, chunk: _Chunk) -> _Stored:
        read = partial(self._part, chunk.file)
        archive = zipfile.ZipFile(_Window(read, chunk.start, chunk.length))
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        tensor = _InertUnpickler(archive.open(entries["data.pkl"])).load()
        storage, offset, sizes, strides, *_ = tensor.args
        if tensor.kind != "_rebuild_tensor_v2" or tuple(sizes) != chunk.sizes:
            raise ValueError(f"{tensor.kind} of sizes {sizes}")
        data = entries[f"data/{storage.args[2]}"]
        if data.compress_type != zipfile.ZIP_STORED:
            raise ValueError("compressed data")
        header = read(chunk.start + data.header_offset, chunk.start + data.header_offset + 30)
        begin = (
            30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )
        return _Stored(
            DTYPES[_STORAGES[storage.args[1].kind]],
            chunk.start + data.header_offset + begin,
            offset,
            tuple(strides),
        )

    def _part(self, name: str, start: int, stop: int) -> bytes:
        try:
            found = self._files.part(name, start, stop)
        except IntegrityError as error:
            raise WeightsError("a file is missing", where=f"{self._where}, {name}") from error
        if len(found) != stop - start:
            raise self._malformed(name, f"an end within bytes {start:,} to {stop:,}")
        return found

    def _malformed(self, name: str, got: str) -> WeightsError:
        return WeightsError(
            "a checkpoint of torch.distributed.checkpoint cannot be read",
            where=f"{self._where}, {name}",
            expected="tensors that torch.distributed.checkpoint.save has written",
            got=printable(got)[:200],
        )


class _Window(io.RawIOBase):
    """A part of a file as a file, which is read in blocks, each once."""

    def __init__(self, read: Any, start: int, length: int) -> None:
        self._read, self._start, self._length = read, start, length
        self._at = 0
        self._blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        number, within = divmod(self._at, _BLOCK)
        block = self._block(number) if self._at < self._length else b""
        piece = block[within : within + len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start, stop = number * _BLOCK, min((number + 1) * _BLOCK, self._length)
            self._blocks[number] = self._read(self._start + start, self._start + stop)
        return self._blocks[number]


def _parsed(metadata: Any) -> tuple[dict[str, TensorSpec], dict[str, list[_Chunk]]]:
    """Return what unpickled metadata says of tensors. Other entries are skipped."""
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        offsets = None if offset is None else _whole(offset)
        places[str(index.fqn), offsets] = info
    specs: dict[str, TensorSpec] = {}
    chunks: dict[str, list[_Chunk]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if entry.kind != "TensorStorageMetadata":
            continue
        shape = _whole(entry.size)
        dtype = entry.properties.state
        dtype = dtype[0] if isinstance(dtype, tuple) else dtype["dtype"]
        specs[name] = TensorSpec(name, str(dtype), shape)
        chunks[name] = [_chunk(name, each, shape, places) for each in entry.chunks]
    return specs, chunks


def _chunk(name: str, chunk: Any, shape: tuple[int, ...], places: Mapping[Any, Any]) -> _Chunk:
    offsets, sizes = _whole(chunk.offsets), _whole(chunk.sizes)
    if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"a part of {name} is outside of it")
    info = places.get((name, offsets)) or places[name, None]
    file = str(info.relative_path)
    if "/" in file or "\\" in file or file in ("", ".", ".."):
        raise ValueError(f"a file outside of the checkpoint: {file}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed or encrypted")
    start, length = _whole((info.offset, info.length))
    return _Chunk(offsets, sizes, file, start, length)


def _whole(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if any(type(each) is not int or each < 0 for each in found):
        raise ValueError(f"not a size: {found}")
    return found


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _runs(chunk: _Chunk, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous ranges of a flattened tensor of `shape` that a chunk has: (start, stop,
    the place of the first element in the flattened chunk).
    """
    if math.prod(chunk.sizes) == 0:
        return
    whole = len(shape)
    while whole > 0 and chunk.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    # dims from `whole` on are complete; of the one before it a range
    inner = max(whole - 1, 0)
    length = math.prod(chunk.sizes[inner:])
    strides = _contiguous(shape)
    for number in range(math.prod(chunk.sizes[:inner])):
        start, rest = 0, number
        for dim in reversed(range(inner)):
            rest, index = divmod(rest, chunk.sizes[dim])
            start += (chunk.offsets[dim] + index) * strides[dim]
        start += sum(chunk.offsets[dim] * strides[dim] for dim in range(inner, len(shape)))
        yield start, start + length, number * length
