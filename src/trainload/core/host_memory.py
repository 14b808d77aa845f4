"""The C library's allocator in processes that hold large tensors."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's settings (malloc.h)."""
LARGE = 8 * 2**20
"""Bytes from which a tensor has its own mapping, which is unmapped when it is freed."""


def return_free_memory() -> None:
    """Return the memory of freed tensors of all sizes to the system.

    A backward pass leaves as much as its activations took.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def return_large_blocks() -> None:
    """Return the memory of large tensors to the system when they are freed.

    glibc keeps freed blocks of up to 32 MiB on its heap, where small blocks that were allocated
    between them prevent their use for larger ones: a rank with 4.5 GiB of tensors took 8 GiB. Other
    C libraries have no such setting.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE)
        library.mallopt(_TRIM_THRESHOLD, LARGE)
