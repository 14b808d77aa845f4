"""How far two tensors are apart, wherever a graph is compared with what it was made from.

Everything is computed in float64, a block of entries at a time: a gradient's float64 copies would take four times its memory, and writing
them more time than the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_NOISE = 1e-6
_MARGIN = 8.0
"""A gradient may differ by so many times what it moves when the weights change in their last bit, as long as that is little beside all
gradients: it has no more digits. So a bias before a BatchNorm or a softmax, whose gradient is zero but for rounding, does not forbid every
other order of summation."""
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


def digits_floor(gradient: Tensor, moved: Tensor, tolerance: float, total: float) -> float:
    """A gradient of a smaller norm than this is compared with this: it has no more digits than a tolerance of this leaves.

    Args:
        gradient: as it is.
        moved: the same gradient where the state is `nudged`.
        tolerance: up to which a relative distance counts as none.
        total: the norm of all gradients, which the result never exceeds.
    """
    return min(_MARGIN * absolute_distance(gradient, moved) / tolerance, total)


def tolerance_for(gradient: Tensor | None, tolerance: float) -> float:
    """The tolerance of a gradient: half a unit of its last place if that is more, for each addition rounds a bfloat16 sum by so much."""
    return tolerance if gradient is None else max(tolerance, torch.finfo(gradient.dtype).eps / 2)


def nudged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with each entry one bit up or down, where they are of floating point; names of one tensor stay names of one."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, Tensor] = {}
    for value in state.values():
        if id(value) not in made:
            made[id(value)] = _nudged(value.detach(), generator).requires_grad_(value.requires_grad)
    return {name: made[id(value)] for name, value in state.items()}


def _nudged(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    step = torch.finfo(value.dtype).eps
    return value * (1 + step * (2 * torch.randint(0, 2, value.shape, generator=generator) - 1)).to(value.dtype)


def norm_of(gradients: Iterable[Tensor | None]) -> float:
    """The norm of all gradients together, of their finite entries."""
    return math.hypot(*(float(_finite(block).norm()) for gradient in gradients if gradient is not None for block in _blocks(gradient)))


def _finite(block: Tensor) -> Tensor:
    """In float64, with zeros for what is not finite."""
    return block.double().nan_to_num(0.0, 0.0, 0.0)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The entries, flattened, (at most `_BLOCK`,) at a time."""
    return iter(torch.split(tensor.detach().reshape(-1), _BLOCK))
