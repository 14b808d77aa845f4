"""How far two tensors are apart, wherever a graph is compared with what it was made from.

Everything is computed in float64, a block of entries at a time: a gradient's float64 copies would take four times its memory, and writing
them more time than the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_NOISE = 1e-6
_BLOCK = 2**17
"""Entries of a block: a megabyte of float64, which stays in a core's cache."""


def relative_distance(expected: Tensor | None, got: Tensor | None, floor: float = 0.0) -> float:
    """The L2 distance, relative to the expected tensor's norm, or to `floor` where that is more; of the finite entries.

    Infinite where shapes, dtypes, or the places of NaN or of infinities differ; nothing (None) counts as zeros.
    """
    if expected is None or got is None:
        present = got if expected is None else expected
        return 0.0 if present is None or not bool((present != 0).any()) else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if torch.equal(expected, got):  # which two NaN are not
        return 0.0
    pairs = zip(_blocks(expected), _blocks(got), strict=True)
    distance = math.hypot(*(float((a.double() - b.double()).norm()) for a, b in pairs))
    if not math.isfinite(distance):
        unlike = ~((expected == got) | (expected.isfinite() & got.isfinite()) | (expected.isnan() & got.isnan()))
        if bool(unlike.any()):
            return float("inf")
        distance = absolute_distance(expected, got)
    return distance / max(norm_of([expected]), floor, 1e-30) if distance else 0.0


def absolute_distance(expected: Tensor, got: Tensor) -> float:
    """The L2 distance of the finite entries."""
    pairs = zip(_blocks(expected), _blocks(got), strict=True)
    return math.hypot(*(float((_finite(a) - _finite(b)).norm()) for a, b in pairs))


def noise_floor(gradients: Iterable[Tensor | None]) -> float:
    """Gradients of a smaller norm than this are compared with this: a millionth of the norm of all gradients' finite entries."""
    return _NOISE * norm_of(gradients)


def norm_of(gradients: Iterable[Tensor | None]) -> float:
    """The norm of all gradients together, of their finite entries."""
    return math.hypot(*(float(_finite(block).norm()) for gradient in gradients if gradient is not None for block in _blocks(gradient)))


def _finite(block: Tensor) -> Tensor:
    """In float64, with zeros for what is not finite."""
    return block.double().nan_to_num(0.0, 0.0, 0.0)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The entries, flattened, (at most `_BLOCK`,) at a time."""
    return iter(torch.split(tensor.detach().reshape(-1), _BLOCK))
