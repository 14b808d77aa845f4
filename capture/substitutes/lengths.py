"""`len` of a tensor while a model is traced. Python makes a plain number of whatever `__len__` returns, which would fix the size."""

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
    """`len(x)` of a tensor is `x.shape[0]` inside, in all modules that a model may be written in and that have no `len` of their own.

    Code that calls it by another name (`builtins.len`), or that is in no module (a string that was executed), gets a plain number.
    """
    spaces = [
        vars(module)
        for path, module in list[tuple[str, Any]](sys.modules.items())  # where anything may stand
        # by its type: what cffi puts there (OpenSSL's functions, for one) says that it is a module, and takes no attributes
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
