"""Operators whose derivatives torch cannot trace for sizes that change, in terms of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_largest: Any = torch.sym_max
Size = int | torch.SymInt


def _masked_select(values: Tensor, mask: Tensor) -> Tensor:
    """Its own derivative has the number of rows of the example in it."""
    values, mask = torch.broadcast_tensors(values, mask)  # type: ignore[no-untyped-call]  # torch's own
    return values[mask]


def _affine_grid(theta: Tensor, size: Sequence[Size], align_corners: bool) -> Tensor:
    """Theta (rows, dims, dims + 1), size (rows, channels, *spatial) -> (rows, *spatial, dims). Its own derivative takes plain numbers.

    Coordinates run from -1 to 1, through the centres of the outermost cells (`align_corners`) or along their outer edges; x is the last.
    """
    spatial = list(size[2:])
    axes = []
    for count in spatial:
        steps: Any = torch.arange(count, dtype=theta.dtype, device=theta.device) * 2  # type: ignore[arg-type]  # takes SymInts
        axes.append((steps - (count - 1)) / (_largest(count - 1, 1) if align_corners else count))
    coordinates = [*reversed(torch.meshgrid(*axes, indexing="ij"))]
    base = torch.stack([*coordinates, torch.ones_like(coordinates[0])], -1).flatten(0, -2)
    return (base @ theta.mT).reshape(theta.shape[0], *spatial, -1)


DERIVABLE: dict[Any, Callable[..., Tensor]] = {
    aten.masked_select.default: _masked_select,
    aten.affine_grid_generator.default: _affine_grid,
}
"""Operator -> what stands for it while a graph is differentiated, called with the operator's own arguments."""
