"""Compile graphs for a device that is only described: nothing may be computed on it.

Tested with torch 2.14.1. Private names used: `torch._inductor.fx_passes.joint_graph`,
`torch.utils._python_dispatch`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainload.capture.source.patched import replaced

_is_described: ContextVar[bool] = ContextVar("is_described", default=False)


@contextlib.contextmanager
def computing_nothing() -> Iterator[None]:
    """Have Inductor compute nothing on GPUs within the context.

    Otherwise it makes the constants of a graph there, and runs kernels to choose between their
    configurations.
    """
    # imported here because it takes a second
    from torch._inductor.fx_passes import joint_graph

    folder = joint_graph.UniformValueConstantFolder
    token = _is_described.set(True)
    try:
        with (
            replaced(folder, "__init__", _on_host(folder.__init__)),
            replaced(folder, "run", _on_host(folder.run)),
        ):
            yield
    finally:
        _is_described.reset(token)


def compiler_options() -> dict[str, Any]:
    """Return the options of `torch._inductor.standalone_compile`, which by itself has kernels
    run to choose their configurations.
    """
    if not _is_described.get():
        return {}
    return {"config_patches": {"triton.autotune_at_compile_time": False}}


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which tensors are made on the CPU instead of a GPU."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        moved = {name: _host(value) for name, value in (kwargs or {}).items()}
        return func(*map(_host, args), **moved)


def _host(value: Any) -> Any:
    is_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_gpu else value


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        with _OnHost():  # type: ignore[no-untyped-call]
            return function(*args, **options)

    return wrapped
