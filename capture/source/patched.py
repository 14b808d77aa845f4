"""Attributes and functions that are others for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

OPERATORS = "torch._higher_order_ops"
"""torch's module of operators that take functions."""
_NOT_OF_MODELS = sys.stdlib_module_names | {
    *("torch", "sympy", "mpmath", "numpy", "networkx", "scipy", "pandas", "pyarrow", "matplotlib", "sklearn"),
    *("ray", "pydantic", "rich", "click", "requests", "urllib3", "aiohttp", "botocore", "google", "grpc", "huggingface_hub", "tokenizers"),
    *("pytest", "_pytest", "hypothesis"),
}
"""Packages that no model is written in, of those that are often in a process and are large."""
_SEARCHED = frozenset({"torch", "torch.func", OPERATORS})
"""torch's modules that functions are looked for in all the same."""


def may_hold_models(path: str) -> bool:
    """Return whether a module of this name may contain the code of a model."""
    return path.partition(".")[0] not in _NOT_OF_MODELS or path.startswith("ray.rllib.")


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
    places = []
    for path, module in list(sys.modules.items()):
        if path not in _SEARCHED and not may_hold_models(path):
            continue
        names = getattr(module, "__dict__", {})
        if not values.keys().isdisjoint(map(id, [*names.values()])):  # a list, since another thread may add to it
            held = [(name, values[id(value)]) for name, value in names.copy().items() if id(value) in values]
            places += [(module, name, value) for name, value in held if not name.startswith("__")]
    with contextlib.ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(replaced(module, name, value))
        yield
