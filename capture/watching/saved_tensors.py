"""A model's own hooks on the tensors that are saved for backward.

How a tensor is kept between forward and backward (packed, offloaded, written to a file) does not
matter to a graph as long as backward gets the same values back. So a trace leaves such hooks out,
and the replay in eager mode requires that every tensor comes back unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainload.capture.diagnostics.blame import own_backward
from trainload.capture.source.patched import replaced
from trainload.core.errors import CaptureError

CHECKPOINT_MODULE = "torch.utils.checkpoint"
_HOOKS = torch.autograd.graph.saved_tensors_hooks


def is_own(context: Any) -> bool:
    """Return True for hooks of the model: neither a checkpoint's nor `save_on_cpu`."""
    return type(context).__module__ != CHECKPOINT_MODULE and not isinstance(
        context, torch.autograd.graph.save_on_cpu
    )


@contextlib.contextmanager
def saved_tensors_checked() -> Iterator[None]:
    """Require, inside the block, that a model's own hooks return the tensors that they received.

    Raises:
        CaptureError: while backward runs, if a tensor comes back with another shape, dtype or
            value.
    """
    original: Any = _HOOKS.__enter__

    def enter(context: Any) -> Any:
        if is_own(context) and not hasattr(context, "trainload_watched"):
            context.trainload_watched = True
            context.pack_hook, context.unpack_hook = _checked_hooks(context)
        return original(context)

    with replaced(_HOOKS, "__enter__", enter):
        yield


def _checked_hooks(context: Any) -> tuple[Any, Any]:
    pack, unpack = context.pack_hook, context.unpack_hook
    page = own_backward(
        f"hooks on saved tensors ({type(context).__name__}) change the values saved for backward,"
        " which a graph cannot represent",
        "Make unpack return exactly what pack received, or implement the backward in a"
        " torch.autograd.Function.",
    )

    def packed(x: Tensor) -> Any:
        return pack(x), x.detach().clone()

    def unpacked(saved: tuple[Any, Tensor]) -> Tensor:
        result: Tensor = unpack(saved[0])
        _check_same(saved[1], result, page)
        return result

    return packed, unpacked


def _check_same(saved: Tensor, result: Tensor, page: CaptureError) -> None:
    if saved.shape != result.shape or saved.dtype != result.dtype:
        page.expected, page.got = (
            f"shape {tuple(saved.shape)}, {saved.dtype}",
            f"shape {tuple(result.shape)}, {result.dtype}",
        )
        raise page
    if not bool(((result == saved) | ((result != result) & (saved != saved))).all()):
        raise page
