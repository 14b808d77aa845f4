"""Temporary replacements of attributes and functions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OPERATORS = "torch._higher_order_ops"
"""Module of torch with the operators that take functions."""
_NOT_OF_MODELS = sys.stdlib_module_names | {
    *(
        "torch",
        "sympy",
        "mpmath",
        "numpy",
        "networkx",
        "scipy",
        "pandas",
        "pyarrow",
        "matplotlib",
        "sklearn",
    ),
    *(
        "ray",
        "pydantic",
        "rich",
        "click",
        "requests",
        "urllib3",
        "aiohttp",
        "botocore",
        "google",
        "grpc",
        "huggingface_hub",
        "tokenizers",
    ),
    *("pytest", "_pytest", "hypothesis"),
}
"""Large packages that are often loaded and contain no model code."""
_SEARCHED = frozenset({"torch", "torch.func", OPERATORS})
"""Modules of torch in which functions are replaced nevertheless."""


def may_hold_models(path: str) -> bool:
    """Return True if a module of this name may contain the code of a model."""
    return path.partition(".")[0] not in _NOT_OF_MODELS or path.startswith("ray.rllib.")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute inside the block."""
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
    """Replace functions of torch inside the block, under every name by which a module holds them.

    torch's own internal modules are left alone. All modules are searched once, for any number of
    functions: a process with transformers in it holds half a million names, so a module's names are
    inspected one by one only if its values contain one of the functions.

    Args:
        replacements: function -> its replacement.
    """
    values = {id(function): value for function, value in replacements.items()}
    places = []
    for path, module in list(sys.modules.items()):
        if path not in _SEARCHED and not may_hold_models(path):
            continue
        names = getattr(module, "__dict__", {})
        # a list, since another thread may add to it
        if not values.keys().isdisjoint(map(id, [*names.values()])):
            matches = [
                (name, values[id(value)])
                for name, value in names.copy().items()
                if id(value) in values
            ]
            places += [
                (module, name, value) for name, value in matches if not name.startswith("__")
            ]
    with contextlib.ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(replaced(module, name, value))
        yield
