"""Has every call of an autograd function arrive at the watch, whatever name the model calls it by."""

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
"""The class below `torch.autograd.Function`. Up to torch 2.14 every `apply` arrives there, also through a name that was bound before."""
_IN_PYTHON = inspect.isfunction(getattr(torch.autograd.Function.apply, "__func__", None))
"""Whether `apply` is Python of Function's own; else it is one builtin, and a name bound before (`f = Mine.apply`) leads past the class."""
_BUILTIN = type(FUNCTION_BASE.apply)

Call = Callable[..., Any]
"""What is called instead: with the autograd function's class and the arguments of `apply`."""


@contextlib.contextmanager
def applied(model: nn.Module, call: Call) -> Iterator[None]:
    """`apply` of every autograd function is `call` inside.

    Where `apply` is a builtin, names that hold it are changed in modules, in the model's modules and in their classes. What holds it
    elsewhere (a closure, a default argument) is not seen: its gradients are autograd's of forward, which the replay compares.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(FUNCTION_BASE, "apply", classmethod(call)))
        if not _IN_PYTHON:
            stack.enter_context(replaced(torch.autograd.Function, "apply", classmethod(_with_defaults(call))))
            for owner, name, held in list(_holders(model)):
                stack.enter_context(replaced(owner, name, _Apply(held.__self__, call)))
        yield


class _Apply:
    """Stands for the `apply` of one autograd function. No function, so that a class holds it as it holds a builtin: without a self."""

    def __init__(self, cls: type, call: Call) -> None:
        self._cls = cls
        self._call = _with_defaults(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._cls, *args, **kwargs)


def _with_defaults(call: Call) -> Call:
    """`call` with forward's defaults and named arguments in their places, as torch's own `apply` has them when there is a setup_context."""

    def bound(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.setup_context is torch.autograd.Function.setup_context:
            return call(cls, *args, **kwargs)
        arguments = inspect.signature(cls.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        return call(cls, *arguments.args, **arguments.kwargs)

    return bound


def _holders(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Everything that holds a bound `apply`: owner, name, the builtin."""
    owners: dict[int, Any] = {id(m): m for path, m in list(sys.modules.items()) if path.partition(".")[0] != "torch"}
    for module in model.modules():
        for owner in (module, *type(module).__mro__):
            if not getattr(owner, "__module__", "").startswith("torch.") or owner is module:
                owners[id(owner)] = owner
    for owner in owners.values():
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, _BUILTIN) and value.__name__ == "apply" and _is_function(value.__self__):
                yield owner, name, value


def _is_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)
