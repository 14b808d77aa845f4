"""Copies of values that are compared later, outside of the memory that a plan accounts for.

On a CPU, a rank's gradients or its optimizer's state take much of the memory itself, so copies of
large values are kept in a file. Copies of a GPU's values are in host memory.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainload.core.logs import log_handled
from trainload.packaging.tensors.safetensors_file import bytes_of

_log = logging.getLogger(__name__)

IN_FILE = 2**20
"""Bytes of a value whose copy is kept in a file."""
_PART = 64 * 2**20
"""Bytes that are read or written at once."""


class OpenFile:
    """A file without a name, which is closed with the last reference to it.

    Raises:
        OSError: the folder (None: that for temporary files) is not writable.
    """

    def __init__(self, folder: Path | None) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """Elements [start, stop) of a flattened copy in a file, or, with `shape`, all of them."""

    file: OpenFile
    place: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> StoredCopy:
        """Return a part of the copy of a tensor of one dim."""
        start, stop, _ = part.indices(len(self))
        return StoredCopy(
            self.file, self.place + start * self.dtype.itemsize, self.dtype, (stop - start,)
        )

    def load(self) -> Tensor:
        """Read the copy into memory."""
        value = torch.empty(self.shape, dtype=self.dtype)
        target = bytes_of(value)
        for start in range(0, len(target), _PART):
            part = target[start : start + _PART]
            filled = 0
            while filled < len(part):
                count = os.preadv(
                    self.file.descriptor, [part[filled:]], self.place + start + filled
                )
                if not count:
                    raise OSError("the file of a copy is too short")
                filled += count
        return value


Copy = Tensor | StoredCopy


def loaded(copy: Copy) -> Tensor:
    """Return a copy in memory."""
    return copy.load() if isinstance(copy, StoredCopy) else copy


class HostCopies:
    """Makes copies; the file is removed with the last of them.

    Args:
        folders: folders for the file, the first writable one of which is used.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [*folders, None]
        self._file: OpenFile | None = None

    def copy(self, value: Tensor) -> Copy:
        """Return a copy of a value of any device, in host memory or in a file."""
        if value.device.type != "cpu" or value.nbytes < IN_FILE:
            return value.to("cpu", copy=True)
        try:
            return self._store(value.contiguous())
        except OSError as error:  # such as a full disk
            log_handled(_log, "a value that is compared was copied to memory, not to a file", error)
            return value.clone()

    def _store(self, value: Tensor) -> StoredCopy:
        if self._file is None:
            self._file = self._open()
        place = os.fstat(self._file.descriptor).st_size
        source = bytes_of(value)
        for start in range(0, len(source), _PART):
            part = source[start : start + _PART]
            written = 0
            while written < len(part):
                written += os.pwrite(self._file.descriptor, part[written:], place + start + written)
        return StoredCopy(self._file, place, value.dtype, tuple(value.shape))

    def _open(self) -> OpenFile:
        for folder in self._folders:
            try:
                return OpenFile(folder)
            except OSError as error:
                refused = error
        raise refused
