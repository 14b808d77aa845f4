"""Checkpoints of torch.distributed.checkpoint (DCP) as a source of weights.

Their metadata and the descriptions of their tensors are pickles. They are read here without the
classes that they name, so that nothing in them is called.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from trainload.core.errors import StorageError, WeightsError, printable
from trainload.packaging.tensors.safetensors_file import DTYPES, TensorSpec, bytes_of, to_fill
from trainload.packaging.weight_sources.source_files import FileSource, described
from trainload.packaging.weight_sources.weight_source import SourceFile

METADATA = ".metadata"
_MAX_METADATA = 2**30
_MAX_DESCRIPTION = 2**20
_BESIDE = frozenset(
    {"optimizer", "optimizers", "optim", "lr_scheduler", "train_state", "dataloader"}
)
"""Entries of checkpoints beside a model, at their root."""
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
    """Elements of a chunk in its file.

    Attributes:
        dtype: their dtype.
        start: place of the storage's first byte.
        offset: place of the first element in the storage.
        strides: the strides, in elements.
        reach: number of elements of the storage from the first one to the last.
    """

    dtype: torch.dtype
    start: int
    offset: int
    strides: tuple[int, ...]
    reach: int


class DcpSource(FileSource):
    """`WeightSource` of a checkpoint of torch.distributed.checkpoint.

    Args:
        where: folder of the checkpoint, at a path or URL.
        known: the files as they were checked.

    Raises:
        WeightsError: the checkpoint is malformed, or not the one that was checked.
        StorageError: the storage cannot be reached.
    """

    def __init__(self, where: str | Path, known: Sequence[SourceFile] = ()) -> None:
        folder = str(where).rstrip("/")
        super().__init__(folder, folder, known)
        self._stored: dict[tuple[str, int], _Stored] = {}

    @cached_property
    def _described(self) -> tuple[dict[str, TensorSpec], dict[str, list[_Chunk]]]:
        """Tensors and their chunks, by the tensors' names."""
        self._unchanged.check(METADATA)
        content = self._files.read(METADATA, _MAX_METADATA)
        if content is None:
            raise WeightsError(f"there is no {METADATA}", where=self._where)
        try:
            return _parsed(_InertUnpickler(io.BytesIO(content)).load())
        except Exception as error:
            raise self._malformed(METADATA, error) from error

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """See `WeightSource.tensors`."""
        return self._described[0]

    def files(self, names: set[str]) -> tuple[SourceFile, ...]:
        """See `WeightSource.files`. The metadata is one of them."""
        parts = {chunk.file for name in names for chunk in self._described[1][name]}
        return tuple(
            described(self._files, name, self._where) for name in (METADATA, *sorted(parts))
        )

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource.slice`."""
        spec = self.tensors[name]
        if not 0 <= start <= stop <= math.prod(spec.shape):
            raise ValueError(f"elements {start} to {stop} are not within {name}, {spec.shape}")
        runs = sorted(
            (max(begin, start), min(end, stop), number, at + max(begin, start) - begin)
            for number, chunk in enumerate(self._described[1][name])
            for begin, end, at in _runs(chunk, spec.shape)
            if begin < stop and start < end
        )
        ends = [start, *(run[1] for run in runs)]
        if [run[0] for run in runs] != ends[:-1] or ends[-1] != stop:
            raise self._malformed(METADATA, f"parts of {name} that overlap or leave a gap")
        found = to_fill((stop - start,), DTYPES[spec.dtype])
        for number, of_chunk in groupby(sorted(runs, key=itemgetter(2)), itemgetter(2)):
            self._fill(found, start, self._described[1][name][number], spec, list(of_chunk))
        return found

    def _fill(
        self,
        into: torch.Tensor,
        start: int,
        chunk: _Chunk,
        spec: TensorSpec,
        runs: Sequence[tuple[int, int, int, int]],
    ) -> None:
        """Fill `into`, whose first element is `start` of the tensor, with runs of a chunk.

        Args:
            into: flat tensor.
            start: place of its first element in the flattened tensor.
            chunk: the chunk.
            spec: the tensor.
            runs: (begin, end, number of the chunk, place of the first element in the flattened
                chunk), sorted.
        """
        self._unchanged.check(chunk.file)
        stored = self._find(chunk, spec)
        if stored.strides == _contiguous(chunk.sizes):
            first, last = runs[0][3], runs[-1][3] + runs[-1][1] - runs[-1][0]
            elements = self._elements(chunk, stored, stored.offset + first, last - first)
        else:
            first = 0
            memory = self._elements(chunk, stored, stored.offset, stored.reach)
            elements = memory.as_strided(chunk.sizes, stored.strides).reshape(-1)
        for low, high, _, at in runs:
            into[low - start : high - start] = elements[at - first : at - first + high - low]

    def _elements(self, chunk: _Chunk, stored: _Stored, start: int, count: int) -> torch.Tensor:
        """Read elements [start, start + count) of a chunk's storage."""
        found = to_fill((count,), stored.dtype)
        begin = stored.start + start * stored.dtype.itemsize
        bytes_of(found)[:] = self._part(chunk.file, begin, begin + found.nbytes)
        return found

    def _find(self, chunk: _Chunk, spec: TensorSpec) -> _Stored:
        """Return where a chunk's elements are in its file, which has an archive by `torch.save`."""
        key = (chunk.file, chunk.start)
        if key not in self._stored:
            try:
                self._stored[key] = self._read_description(chunk)
            except (WeightsError, StorageError):
                raise
            except Exception as error:
                raise self._malformed(chunk.file, error) from error
        stored = self._stored[key]
        if stored.dtype != DTYPES[spec.dtype]:
            raise self._malformed(chunk.file, f"a tensor of {stored.dtype}")
        return stored

    def _read_description(self, chunk: _Chunk) -> _Stored:
        """Read a chunk's description.

        Raises whatever a malformed archive, pickle or description causes.
        """
        read = partial(self._part, chunk.file)
        archive = zipfile.ZipFile(_Window(read, chunk.start, chunk.length))
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        description = entries["data.pkl"]
        if description.compress_type != zipfile.ZIP_STORED or description.flag_bits & 1:
            raise ValueError("a compressed or encrypted description")
        if description.file_size > _MAX_DESCRIPTION:
            raise ValueError("a description of more than a MiB")
        tensor = _InertUnpickler(archive.open(description)).load()
        if tensor.kind not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            raise ValueError("not a plain tensor")
        storage, offset, sizes, strides, _, _, *more = tensor.args
        dtype = DTYPES[more.pop(0) if tensor.kind.endswith("3") else _dtype_of(storage)]
        if any(more):
            raise ValueError("a conjugated or negated tensor")
        (offset,), sizes, strides = _whole((offset,)), _whole(sizes), _whole(strides)
        if sizes != chunk.sizes or len(strides) != len(sizes):
            raise ValueError("sizes that the metadata do not have")
        data = entries[f"data/{storage.args[2]}"]
        if data.compress_type != zipfile.ZIP_STORED or data.flag_bits & 1:
            raise ValueError("compressed or encrypted data")
        reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        reach = reach if math.prod(sizes) else 0
        if (offset + reach) * dtype.itemsize > data.file_size:
            raise ValueError("a tensor that is longer than its data")
        header = chunk.start + data.header_offset
        lengths = read(header + 26, header + 30)
        begin = header + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
        if begin + data.file_size > chunk.start + chunk.length:
            raise ValueError("data that are longer than their part")
        return _Stored(dtype, begin, offset, strides, reach)

    def _malformed(self, name: str, got: str | Exception) -> WeightsError:
        said = got if isinstance(got, str) else f"{type(got).__name__}: {got}"
        return WeightsError(
            "a checkpoint of torch.distributed.checkpoint cannot be read",
            where=f"{self._where}, {name}",
            expected="tensors that torch.distributed.checkpoint.save has written",
            got=printable(said[:200]),
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
    """Return what unpickled metadata says of tensors, without those of an optimizer's state.

    Raises whatever malformed metadata cause.
    """
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        places[index.fqn, None if offset is None else _whole(offset)] = info
    specs: dict[str, TensorSpec] = {}
    chunks: dict[str, list[_Chunk]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise TypeError("a name that is none")
        if entry.kind != "TensorStorageMetadata" or name.partition(".")[0] in _BESIDE:
            continue
        shape = _whole(entry.size)
        dtype = entry.properties.state
        dtype = dtype[0] if isinstance(dtype, tuple) else dtype["dtype"]
        specs[name] = TensorSpec(name, dtype if isinstance(dtype, str) else "unknown", shape)
        chunks[name] = [_chunk(name, each, shape, places) for each in entry.chunks]
    return specs, chunks


def _chunk(name: str, chunk: Any, shape: tuple[int, ...], places: Mapping[Any, Any]) -> _Chunk:
    offsets, sizes = _whole(chunk.offsets), _whole(chunk.sizes)
    if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
        raise ValueError("a part that is outside of its tensor")
    info = places.get((name, offsets)) or places[name, None]
    file = info.relative_path
    if not isinstance(file, str) or not file.isprintable() or {"/", "\\"} & {*file}:
        raise ValueError("a file outside of the checkpoint")
    if getattr(info, "transform_descriptors", None):
        raise ValueError("a compressed or encrypted part")
    start, length = _whole((info.offset, info.length))
    return _Chunk(offsets, sizes, file, start, length)


def _dtype_of(storage: Any) -> str:
    """Return the dtype of a typed storage."""
    return _STORAGES[storage.args[1].kind]


def _whole(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if any(type(each) is not int or not 0 <= each < 2**63 for each in found):
        raise ValueError("sizes that are none")
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
