"""Distances between tensors, for comparing a graph with the one it was derived from.

Everything is computed in float64, one block of entries at a time: float64 copies of a gradient
would take four times its memory, and writing them would take longer than the comparison. Only
finite entries enter a norm, since one infinity would make the norm infinite and every relative
distance 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_NOISE = 1e-6
_MARGIN = 8.0
"""A gradient may differ by this many times its change under a last-bit change of the weights.

It has no more digits than that, as long as the change is small compared to all gradients. So a bias
before a BatchNorm or a softmax, whose gradient is zero except for rounding, does not forbid every
other order of summation.
"""
_BLOCK = 2**17
"""Entries of a block: a megabyte of float64, which fits in a core's cache."""


def relative_distance(expected: Tensor | None, got: Tensor | None, floor: float = 0.0) -> float:
    """Return the L2 distance of the finite entries, relative to the expected tensor's norm.

    It is relative to `floor` if that is larger.

    Infinite if shapes, dtypes, or the positions of NaN or of infinities differ; None counts as
    zeros.
    """
    if expected is None or got is None:
        present = got if expected is None else expected
        return 0.0 if present is None or not bool((present != 0).any()) else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if torch.equal(expected, got):  # false if both have a NaN
        return 0.0
    pairs = zip(_blocks(expected), _blocks(got), strict=True)
    distance = math.hypot(*(float((a.double() - b.double()).norm()) for a, b in pairs))
    if not math.isfinite(distance):
        unlike = ~(
            (expected == got)
            | (expected.isfinite() & got.isfinite())
            | (expected.isnan() & got.isnan())
        )
        if bool(unlike.any()):
            return float("inf")
        distance = absolute_distance(expected, got)
    return distance / max(norm_of([expected]), floor, 1e-30) if distance else 0.0


def absolute_distance(expected: Tensor, got: Tensor) -> float:
    """Return the L2 distance of the finite entries."""
    pairs = zip(_blocks(expected), _blocks(got), strict=True)
    return math.hypot(*(float((_finite(a) - _finite(b)).norm()) for a, b in pairs))


def noise_floor(total: float) -> float:
    """Return the least norm to which a gradient's distance is relative.

    It is a millionth of `total`, the norm of all gradients.
    """
    return _NOISE * total


def digits_floor(gradient: Tensor, moved: Tensor, tolerance: float, total: float) -> float:
    """Return the norm below which a gradient has no more digits than the tolerance leaves.

    Distances are relative to at least this.

    Args:
        gradient: the gradient.
        moved: the same gradient with the state `nudged`.
        tolerance: largest relative distance that counts as equal.
        total: norm of all gradients, which the result never exceeds.
    """
    return min(_MARGIN * absolute_distance(gradient, moved) / tolerance, total)


def tolerance_for(gradient: Tensor | None, tolerance: float) -> float:
    """Return the tolerance of a gradient: at least half a unit of its last place.

    Each addition rounds a bfloat16 sum by as much.
    """
    return tolerance if gradient is None else max(tolerance, torch.finfo(gradient.dtype).eps / 2)


def nudged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with each floating-point entry moved one bit up or down.

    Names of one tensor remain names of one.
    """
    generator = torch.Generator().manual_seed(0)
    copies: dict[int, Tensor] = {}
    for value in state.values():
        if id(value) not in copies:
            copies[id(value)] = _nudge(value.detach(), generator).requires_grad_(
                value.requires_grad
            )
    return {name: copies[id(value)] for name, value in state.items()}


def _nudge(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    step = torch.finfo(value.dtype).eps
    return value * (1 + step * (2 * torch.randint(0, 2, value.shape, generator=generator) - 1)).to(
        value.dtype
    )


def norm_of(gradients: Iterable[Tensor | None]) -> float:
    """Return the norm of all gradients together, over their finite entries."""
    return math.hypot(
        *(
            float(_finite(block).norm())
            for gradient in gradients
            if gradient is not None
            for block in _blocks(gradient)
        )
    )


def _finite(block: Tensor) -> Tensor:
    """Return the block in float64, with zeros for entries that are not finite."""
    return block.double().nan_to_num(0.0, 0.0, 0.0)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the flattened entries in blocks of at most `_BLOCK`."""
    return iter(torch.split(tensor.detach().reshape(-1), _BLOCK))
