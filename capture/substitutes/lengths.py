"""Replaces `len` while a model is traced.

Python converts the result of `__len__` to a plain number, which would fix the size.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor

from trainload.capture.source.patched import may_hold_models


@contextlib.contextmanager
def lengths() -> Iterator[None]:
    """Make `len(x)` of a tensor return `x.shape[0]` inside the block.

    It applies to all modules that may hold a model's code and have no `len` of their own. Code that
    calls it by another name (`builtins.len`), or that is in no module (an executed string), gets a
    plain number.
    """
    spaces = [
        vars(module)
        # sys.modules may hold any object
        for path, module in list[tuple[str, Any]](sys.modules.items())
        # by its type: objects of cffi (OpenSSL's functions, for one) claim to be modules, but
        # accept no attributes
        if issubclass(type(module), ModuleType)
        and may_hold_models(path)
        and path.partition(".")[0] != "trainload"
        and "len" not in vars(module)
    ]
    for space in spaces:
        space["len"] = _length
    try:
        yield
    finally:
        for space in spaces:
            space.pop("len", None)


def _length(value: Any, /) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else builtins.len(value)
