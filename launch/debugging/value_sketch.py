"""Sketches of tensors, from which the distance of two tensors is estimated without having both."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WIDTH = 64
"""Numbers of a sketch. The distance of two tensors is estimated to about 10 %."""
_FACTORS = (2654435761, 2246822519)
_MASK = 2**32 - 1


def sketch_of(value: Tensor) -> Tensor:
    """Return float64 (WIDTH,) on the CPU: the sums of the elements of each of WIDTH parts, with
    signs that depend on the position alone; so it is the same on every device and in every dtype
    that holds the elements.

    The squared norm of the difference of two sketches is, on average over signs, the squared norm
    of the difference of the tensors.

    Args:
        value: a real tensor of any shape.
    """
    flat = value.detach().reshape(-1).double()
    signed = flat * _signs(flat.numel(), flat.device)
    short = -flat.numel() % WIDTH
    padded = torch.cat([signed, signed.new_zeros(short)]) if short else signed
    return padded.view(-1, WIDTH).sum(0).cpu()


def relative_distance_of(own: Tensor, norm: float, other: Tensor, other_norm: float) -> float:
    """Return the estimated norm of the difference of two tensors over the greater norm.

    Infinite if one of them is not finite; 0 if neither is, since nothing can be said then.

    Args:
        own: sketch of one tensor.
        norm: its L2 norm.
        other: sketch of the other tensor.
        other_norm: its L2 norm.
    """
    if not (math.isfinite(norm) and math.isfinite(other_norm)):
        return 0.0 if not math.isfinite(norm) and not math.isfinite(other_norm) else math.inf
    distance = float((own - other).norm())
    return distance / max(norm, other_norm) if distance else 0.0


def _signs(count: int, device: torch.device) -> Tensor:
    """Return float64 (count,) of 1 and -1."""
    bits = torch.arange(count, dtype=torch.int64, device=device)
    for factor in _FACTORS:
        bits = (bits * factor) & _MASK
        bits = bits ^ (bits >> 15)
    return (1 - 2 * (bits & 1)).double()
