"""Recognise failed allocations."""

from __future__ import annotations

import torch

PHRASES = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
"""Phrases in the errors of torch's allocators, of numpy and of the system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports a failed allocation."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        word in str(error) for word in PHRASES
    )
