"""A shard of a checkpoint: a safetensors file that is written in one pass with its digests, and
read in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trainload.core.canonical_json import canonical_json, parse_canonical
from trainload.core.errors import CheckpointError, PackageError
from trainload.launching.checkpoints.checkpoint_files import CheckpointFiles
from trainload.launching.checkpoints.checkpoint_place import Draft
from trainload.launching.checkpoints.index import FileRecord
from trainload.packaging.tensors import chunks
from trainload.packaging.tensors.safetensors_file import (
    CODES,
    DTYPES,
    MAX_HEADER,
    Place,
    bytes_of,
    header_length,
    to_fill,
)

CURE = "Resume from an earlier checkpoint."


def write_shard(draft: Draft, name: str, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Write contiguous CPU tensors of any shape as a safetensors file, without a second copy in
    memory.

    The tensors are sorted by item size, largest first, and otherwise keep their order.

    Returns:
        Name, size and digests of the file.

    Raises:
        OSError, StorageError: the file cannot be written.
        CheckpointError: safetensors does not support a tensor's dtype.
    """
    # The writer of the safetensors library needs the whole file in memory, or a second pass over it
    # for the digests, and hides the errno of a full disk. The format allows no holes; the largest
    # item size first keeps every tensor aligned.
    names = sorted(tensors, key=lambda key: -tensors[key].element_size())
    header: dict[str, object] = {}
    offset = 0
    for key in names:
        tensor = tensors[key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in CODES:
            raise CheckpointError(
                "a tensor has a dtype that safetensors does not support",
                where=key,
                expected=", ".join(CODES),
                got=dtype,
            )
        end = offset + tensor.nbytes
        header[key] = {
            "dtype": CODES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = canonical_json(header)
    head += b" " * (-len(head) % 8)
    size = 8 + len(head) + offset
    chunk = chunks.chunk_for(size)
    digests = chunks.ChunkDigests(chunk)
    with draft.writing(name, size) as file:
        blocks = [memoryview(len(head).to_bytes(8, "little") + head)]
        blocks += [
            tensors[key].reshape(-1).view(torch.uint8).numpy().data
            for key in names
            if tensors[key].nbytes
        ]
        for block in blocks:
            for start in range(0, len(block), chunks.CHUNK):
                piece = block[start : start + chunks.CHUNK]
                file.write(piece)
                digests.update(piece)
    return FileRecord(name=draft.name_of(name), size=size, chunk=chunk, chunks=digests.finish())


class ShardReader:
    """Reader of a shard that `write_shard` wrote. It reads only the necessary chunks, and checks
    each one.

    Every method raises CheckpointError if the file cannot be read or has changed where it is read,
    and StorageError if a URL cannot be reached.
    """

    def __init__(self, files: CheckpointFiles, record: FileRecord, last: chunks.LastChunk) -> None:
        self._path, self._record = f"{files.where}/{record.name}", record
        with self._reading():
            size = files.size(record.name)
        if size != record.size:
            raise self._changed_error(f"{record.size} bytes", f"{size} bytes")
        self._file = chunks.ChunkedFile(
            lambda: files.opened(record.name),
            size,
            record.chunks,
            self._damaged_error,
            last,
            record.chunk,
        )
        self._places = self._read_header()

    def check(self) -> None:
        """Read and check the whole file."""
        with self._reading():
            self._file.check()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, with its own memory."""
        tensor = to_fill(self._place(name).shape, self.dtype(name))
        self.fill(name, 0, tensor.reshape(-1))
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return DTYPES[self._place(name).dtype]

    def fill(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor with elements of a flattened tensor of the same dtype, from
        `start` on.
        """
        place = self._place(name)
        assert 0 <= start <= start + len(into) <= math.prod(place.shape)
        assert into.dtype == DTYPES[place.dtype], (name, into.dtype)
        with self._reading():
            self._file.fill(place.start + start * into.itemsize, bytes_of(into))

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise CheckpointError(
                "a shard lacks a tensor that the index lists",
                where=self._path,
                expected=name,
                hint=CURE,
            )
        return self._places[name]

    def _read_header(self) -> dict[str, Place]:
        names = {code: name for name, code in CODES.items()}
        with self._reading():
            length = header_length(
                self._file.read(0, min(8, self._file.size)), self._file.size, self._path
            )
            head = self._file.read(8, 8 + length).rstrip(b" ")
            entries = parse_canonical(head, self._path, max_bytes=MAX_HEADER, max_depth=4)
        at = 8 + length
        return {
            name: Place(
                names[entry["dtype"]],
                tuple(entry["shape"]),
                at + entry["data_offsets"][0],
                at + entry["data_offsets"][1],
            )
            for name, entry in entries.items()
        }

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, PackageError) as error:
            raise CheckpointError(
                "a shard cannot be read", where=self._path, got=str(error), hint=CURE
            ) from error

    def _damaged_error(self, number: int) -> CheckpointError:
        return self._changed_error(
            f"sha256 {self._record.chunks[number]} of bytes from {number * self._record.chunk}",
            "another",
        )

    def _changed_error(self, expected: str, got: str) -> CheckpointError:
        return CheckpointError(
            "a shard has changed since it was written",
            where=self._path,
            expected=expected,
            got=got,
            hint=CURE,
        )
