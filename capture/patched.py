"""Attributes and functions that are others for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

OPERATORS = "torch._higher_order_ops"
"""torch's module of operators that take functions."""


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """An attribute that is another one inside."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def renamed(function: object, value: object) -> Iterator[None]:
    """A function of torch that is another one inside, under every name by which a module holds it; torch's other inner modules keep it."""
    places = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path in ("torch", "torch.func", OPERATORS) or path.partition(".")[0] != "torch"
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is function and not name.startswith("__")
    ]
    with contextlib.ExitStack() as stack:
        for module, name in places:
            stack.enter_context(replaced(module, name, value))
        yield
