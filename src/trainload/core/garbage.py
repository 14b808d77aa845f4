"""Python's cyclic garbage collector while large graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the block, or in the decorated function.

    The collector would traverse all nodes of all graphs repeatedly, and call `gc.callbacks` and
    finalizers in the middle of a model's forward.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
