"""Redirects all calls of autograd functions to the watch, whatever name the model uses."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trainload.capture.source.patched import replaced

FUNCTION_BASE: Any = torch.autograd.Function.__mro__[1]
"""The class below `torch.autograd.Function`.

Up to torch 2.14 every `apply` ends up there, also through a name that was bound before tracing.
"""
_IN_PYTHON = inspect.isfunction(getattr(torch.autograd.Function.apply, "__func__", None))
"""True if `apply` is a Python method of `Function`.

From torch 2.15 on it is a single builtin, and a name that was bound before tracing
(`f = Mine.apply`) bypasses every class whose attribute could be replaced.
"""
_BUILTIN = type(FUNCTION_BASE.apply)

Call = Callable[..., Any]
"""Replacement for `apply`: takes the autograd function's class and the arguments of `apply`."""


@contextlib.contextmanager
def applied(model: nn.Module, call: Call) -> Iterator[None]:
    """Replace `apply` of every autograd function by `call` inside the block.

    Where `apply` is a builtin, names bound to it are replaced in Python modules, in the model's
    modules and in their classes. References elsewhere (a closure, a default argument) are not
    found: their gradients are autograd's own gradients of forward, which the replay compares with
    eager mode.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(FUNCTION_BASE, "apply", classmethod(call)))
        if not _IN_PYTHON:
            stack.enter_context(
                replaced(torch.autograd.Function, "apply", classmethod(_with_defaults(call)))
            )
            for owner, name, bound_apply in list(_holders(model)):
                stack.enter_context(replaced(owner, name, _Apply(bound_apply.__self__, call)))
        yield


class _Apply:
    """Replacement for a bound `apply` of one autograd function.

    It is an object, not a function, so that a class that holds it does not pass `self`, as with a
    builtin.
    """

    def __init__(self, cls: type, call: Call) -> None:
        self._cls = cls
        self._call = _with_defaults(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._cls, *args, **kwargs)


def _with_defaults(call: Call) -> Call:
    """Wrap `call` so that defaults and keyword arguments of forward become positional arguments.

    torch's own `apply` does the same for a function with a setup_context.
    """

    def bound(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.setup_context is torch.autograd.Function.setup_context:
            return call(cls, *args, **kwargs)
        arguments = inspect.signature(cls.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        return call(cls, *arguments.args, **arguments.kwargs)

    return bound


def _holders(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yield every reference to a bound `apply` as (owner, attribute name, builtin)."""
    owners: dict[int, Any] = {
        id(m): m for path, m in list(sys.modules.items()) if path.partition(".")[0] != "torch"
    }
    for module in model.modules():
        for owner in (module, *type(module).__mro__):
            if not getattr(owner, "__module__", "").startswith("torch.") or owner is module:
                owners[id(owner)] = owner
    for owner in owners.values():
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if (
                isinstance(value, _BUILTIN)
                and value.__name__ == "apply"
                and _is_function(value.__self__)
            ):
                yield owner, name, value


def _is_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)
