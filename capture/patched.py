"""Attributes and functions that are others for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OPERATORS = "torch._higher_order_ops"
"""torch's module of operators that take functions."""
_SEARCHED = frozenset({"torch", "torch.func", OPERATORS})
_SKIPPED = frozenset({"torch", "sympy", "mpmath", "numpy", "networkx"}) | sys.stdlib_module_names
"""Packages whose other modules hold no function of torch by a name that a model uses."""


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
def renamed(replacements: Mapping[Callable[..., Any], object]) -> Iterator[None]:
    """Replace functions of torch inside the block, under every name by which a module holds them; torch's other inner modules keep them.

    All modules are searched once, whatever the number of functions: a process with transformers in it holds half a million names, and a
    module's names are looked at one by one only where its values have one of the functions.

    Args:
        replacements: function -> what stands for it.
    """
    values = {id(function): value for function, value in replacements.items()}
    places = [
        (module, name, values[id(held)])
        for path, module in list(sys.modules.items())
        if path in _SEARCHED or path.partition(".")[0] not in _SKIPPED
        for names in (getattr(module, "__dict__", {}).copy(),)  # which another thread may add to
        if not values.keys().isdisjoint(map(id, names.values()))
        for name, held in names.items()
        if id(held) in values and not name.startswith("__")
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(replaced(module, name, value))
        yield
