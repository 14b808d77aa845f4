"""Replacements for functions of torch while torch compiles the bodies of control-flow operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainload.capture.source.patched import renamed, replaced

ALPHA = 1.7580993408473766
"""Product of SELU's two constants."""


@contextlib.contextmanager
def bodies() -> Iterator[None]:
    """Replace functions that torch cannot trace in a control-flow body, inside the block."""
    with contextlib.ExitStack() as stack:
        # Dynamo identifies `checkpoint` by its object and caches what it found first, so the names
        # that a model holds are replaced, not the attribute of torch's module. Dynamo itself fails
        # on a checkpoint in a branch of cond (KeyError `_checkpoint_context_fn`).
        stack.enter_context(renamed({checkpoint: _call_without_checkpoint}))
        for name, own in _DROPOUTS.items():
            stack.enter_context(replaced(functional, name, own))
        yield


def _call_without_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: object = None,
    determinism_check: str = "",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Call the function of a checkpoint in a control-flow body without checkpointing it.

    torch keeps what the backward of such a body needs in any case.
    """
    kwargs.pop("preserve_rng_state", None)
    return function(*args, **kwargs)


# torch's dropout kernels query the number of elements, which fails in a scan with dynamic sizes.
# These draw the same numbers.


def _noise(x: Tensor, p: float, own: int | None) -> Tensor:
    """Return noise that is 1 with probability 1 - p, else 0.

    It has the shape of x, with size 1 in the dims after the first `own`, if given.
    """
    first: Any = (..., *[slice(1)] * (0 if own is None else x.ndim - own))
    return torch.empty_like(x[first], memory_format=torch.contiguous_format).bernoulli_(1 - p)


def _dropout(
    original: Callable[..., Tensor], own: Callable[[int], int] | None = None
) -> Callable[..., Tensor]:
    """Return a dropout of elements, or of all entries within `own(number of dims)` leading dims."""

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p in (0, 1):
            return original(input, p, training, inplace)
        factor = _noise(input, p, own and own(input.ndim)).div_(1 - p)
        return input.mul_(factor) if inplace else input * factor

    return dropout


def _alpha_dropout(
    original: Callable[..., Tensor], own: int | None = None
) -> Callable[..., Tensor]:
    """Return a dropout that preserves the mean and variance of SELU's outputs."""

    def dropout(
        input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> Tensor:
        if not training or p in (0, 1):
            return original(input, p, training, inplace)
        noise = _noise(input, p, own)
        factor = float(((ALPHA**2 * p + 1) * (1 - p)) ** -0.5)
        shift = noise.add(-1).mul_(ALPHA * factor).add_(ALPHA * factor * p)
        noise.mul_(factor)
        return input.mul_(noise).add_(shift) if inplace else input * noise + shift

    return dropout


_DROPOUTS: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout(functional.dropout),
    "dropout1d": _dropout(functional.dropout1d, lambda ndim: ndim - 1),
    "dropout2d": _dropout(functional.dropout2d, lambda _: 2),
    "dropout3d": _dropout(functional.dropout3d, lambda ndim: ndim - 3),
    "alpha_dropout": _alpha_dropout(functional.alpha_dropout),
    "feature_alpha_dropout": _alpha_dropout(functional.feature_alpha_dropout, 2),
}
"""Name in torch.nn.functional -> its replacement."""
