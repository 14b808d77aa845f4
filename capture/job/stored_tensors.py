"""Tensors that are kept for a comparison, outside of memory if they are large: copies of a model's
weights or gradients would take as much memory as the model.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainload.core.errors import StorageError

_IN_MEMORY = 64 * 2**20
"""Bytes that stay in memory; all tensors are written to a file if they take more."""


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensors(MutableMapping[str, Tensor | None]):
    """Tensors by name, in a temporary file if they are large; or None.

    Reading an entry returns a new contiguous tensor, on the device of the one that was stored.

    Raises:
        StorageError: the folder of temporary files cannot be written, or is full.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  # closed below
        weakref.finalize(self, self._file.close)
        self._size = 0
        self._places: dict[str, _Place | None] = {}

    def __setitem__(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            self._places[name] = None
            return
        place = _Place(self._size, tensor.shape, tensor.dtype, tensor.device)
        before = self._places.get(name)
        if before is not None and before.size == place.size:
            place = _Place(before.start, tensor.shape, tensor.dtype, tensor.device)
        else:
            self._size += place.size
        data: Any = _bytes_of(tensor).numpy()
        try:
            self._file.seek(place.start)
            self._file.write(memoryview(data))
        except OSError as error:
            raise StorageError(
                f"tensors that are to be compared cannot be stored: {error.strerror}",
                where=tempfile.gettempdir(),
                expected="as much free space as the weights take",
                hint="Free some space, or set TMPDIR to a folder of another disk.",
            ) from error
        self._places[name] = place

    def __getitem__(self, name: str) -> Tensor | None:
        place = self._places[name]
        if place is None:
            return None
        tensor = torch.empty(place.shape, dtype=place.dtype)
        self._file.seek(place.start)
        buffer: Any = _bytes_of(tensor).numpy()
        self._file.readinto(buffer)
        return tensor.to(place.device)

    def __delitem__(self, name: str) -> None:
        del self._places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def missing(self) -> set[str]:
        """Return the names with None."""
        return {name for name, place in self._places.items() if place is None}

    def is_equal(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor equals the stored one of this name, bit for bit."""
        stored = self[name]
        return stored is not None and has_equal_bits(stored, tensor)

    def restore(self, name: str, tensor: Tensor) -> None:
        """Write the stored values to a tensor of the same shape."""
        stored = self[name]
        assert stored is not None
        tensor.copy_(stored)

    def add(self, name: str, tensor: Tensor) -> None:
        """Store a tensor, or its sum with the one that is stored."""
        before = self.get(name)
        self[name] = tensor if before is None else before + tensor


def has_equal_bits(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors are equal bit for bit, so that NaN equals NaN."""
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and torch.equal(_bytes_of(first), _bytes_of(second))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)
