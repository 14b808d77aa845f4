"""Tensors without values, while a construction is recorded and its graphs are traced.

Torch's private names are FakeTensorMode's. Tested with torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""Exceptions of operators whose result depends on values."""


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have no values; others are converted."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # see `without_references`
    return mode


@contextmanager
def without_references(mode: FakeTensorMode) -> Iterator[None]:
    """Enter the mode, and remove its weak references to tensors on exit.

    `nn.Module.to` exchanges parameters, which is impossible while there are references to them.
    """
    try:
        with mode:
            yield
    finally:
        mode.fake_tensor_converter.tensor_memo.clear()
