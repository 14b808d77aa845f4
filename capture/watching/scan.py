"""torch's associative scan along a dim of fixed length.

It becomes slices, and vmaps of the function that combines two entries.

The algorithm and the order of combining are those of torch in eager mode, so that values and
gradients are bitwise those of eager mode. torch.export would trace the scan through vmap's
internals, which treat the number of rows as a constant.

The algorithm is that of Guy E. Blelloch, "Prefix sums and their applications" (1990), in the form
of jax.lax.associative_scan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainload.capture.source.patched import OPERATORS
from trainload.capture.watching.nest import mapped

_ORIGINAL: tuple[Callable[..., Any], ...] = tuple(
    filter(None, [getattr(sys.modules.get(OPERATORS), "associative_scan", None)])
)
"""torch's function, a prototype; empty if this version of torch has none.

A tuple, so that the watch's replacement by name does not reach it.
"""

Leaves = list[Tensor]


def replacements(vmap: Callable[..., Any]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return a map from `associative_scan` to its replacement while tracing.

    vmap: replacement for torch.func.vmap.
    """
    return {original: _scan_by(vmap, original) for original in _ORIGINAL}


def _scan_by(vmap: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with torch's signature.

    It calls torch's own code for arguments that eager mode rejects too, and for a dynamic length.
    """

    def associative_scan(
        combine_fn: Callable[[Any, Any], Any],
        xs: Any,
        dim: int,
        reverse: bool = False,
        combine_mode: str = "pointwise",
    ) -> Any:
        leaves = _leaves(xs)
        if combine_mode != "generic" or not leaves or not all(_has_length(x, dim) for x in leaves):
            return original(combine_fn, xs, dim, reverse, combine_mode)

        def combine(*both: Tensor) -> tuple[Tensor, ...]:
            left, right = iter(both[: len(leaves)]), iter(both[len(leaves) :])
            return tuple(
                _leaves(
                    combine_fn(mapped(xs, lambda _: next(left)), mapped(xs, lambda _: next(right)))
                )
            )

        def combined(left: Leaves, right: Leaves) -> Leaves:
            return list(vmap(combine)(*left, *right))

        first = [x.movedim(dim, 0) for x in leaves]
        scanned = _scan(combined, [x.flip(0) for x in first] if reverse else first)
        results = iter([(x.flip(0) if reverse else x).movedim(0, dim) for x in scanned])
        return mapped(xs, lambda _: next(results))

    return associative_scan


def _has_length(x: Tensor, dim: int) -> bool:
    """Return True if the dim exists and its length is a fixed number other than 0."""
    return -x.ndim <= dim < x.ndim and isinstance(x.shape[dim], int) and x.shape[dim] > 0


def _leaves(tree: Any) -> Leaves:
    tensors: Leaves = []
    mapped(tree, tensors.append)
    return tensors


def _scan(combined: Callable[[Leaves, Leaves], Leaves], entries: Leaves) -> Leaves:
    """Return the running combination along dim 0.

    Entries at odd indices are the scan of combined pairs; the others follow from them.
    """
    length = entries[0].shape[0]
    if length < 2:
        return entries
    odd = _scan(
        combined, combined([x[: length - 1 : 2] for x in entries], [x[1::2] for x in entries])
    )
    even = [x[:1] for x in entries]
    before = (length - 1) // 2
    if before:
        later = combined([x[:before] for x in odd], [x[2::2] for x in entries])
        even = [torch.cat([first, rest]) for first, rest in zip(even, later, strict=True)]
    return [_interleave(a, b) for a, b in zip(even, odd, strict=True)]


def _interleave(even: Tensor, odd: Tensor) -> Tensor:
    """Interleave the entries of two tensors; `even` has as many as `odd`, or one more."""
    pairs = torch.stack([even[: odd.shape[0]], odd], 1).flatten(0, 1)
    return pairs if even.shape[0] == odd.shape[0] else torch.cat([pairs, even[odd.shape[0] :]])
