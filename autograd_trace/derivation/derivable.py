"""Replacements for operators whose derivatives torch cannot trace for dynamic sizes, or traces
without their error checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_largest: Any = torch.sym_max
Size = int | torch.SymInt
_LOW = (torch.bfloat16, torch.float16)


def _masked_select(values: Tensor, mask: Tensor) -> Tensor:
    """Select by indexing. The derivative of `masked_select` itself has the example's number of rows
    baked in.
    """
    values, mask = torch.broadcast_tensors(values, mask)  # type: ignore[no-untyped-call]  # torch's own
    return values[mask]


def _affine_grid(theta: Tensor, size: Sequence[Size], align_corners: bool) -> Tensor:
    """Compute theta (rows, dims, dims + 1), size (rows, channels, *spatial) -> (rows, *spatial,
    dims).

    The derivative of `affine_grid_generator` accepts only plain integers. Coordinates run from -1
    to 1, through the centres of the outermost cells (`align_corners`) or along their outer edges; x
    is the last.
    """
    spatial = list(size[2:])
    axes = []
    for count in spatial:
        steps: Any = torch.arange(count, dtype=theta.dtype, device=theta.device) * 2  # type: ignore[arg-type]  # accepts SymInts
        axes.append((steps - (count - 1)) / (_largest(count - 1, 1) if align_corners else count))
    coordinates = [*reversed(torch.meshgrid(*axes, indexing="ij"))]
    base = torch.stack([*coordinates, torch.ones_like(coordinates[0])], -1).flatten(0, -2)
    return (base @ theta.mT).reshape(theta.shape[0], *spatial, -1)


def _with_info_check(operator: Any, name: str, what: str) -> Callable[..., Any]:
    """Return a substitute for an operator of torch.linalg that fails on some matrices.

    torch differentiates its `_ex` form, which returns wrong numbers where the operator raises; the
    substitute checks `info`.

    Args:
        operator: operator of torch.linalg that returns results and then `info`, which is not 0
            where it failed.
        name: the operator's public name.
        what: description of the matrices that it fails on.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        # autocast computes the original operator in float32
        if device == "cpu" and torch.is_autocast_enabled(device):
            args = tuple(
                value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
                for value in args
            )
        result, info = operator(*args, **kwargs)
        aten._assert_async.msg((info == 0).all(), f"{name}: a matrix is {what}")
        return result

    return call


DERIVABLE: dict[Any, Callable[..., Any]] = {
    aten.masked_select.default: _masked_select,
    aten.affine_grid_generator.default: _affine_grid,
    aten.linalg_cholesky.default: _with_info_check(
        torch.linalg.cholesky_ex, "linalg.cholesky", "not positive-definite"
    ),
    aten.linalg_inv.default: _with_info_check(torch.linalg.inv_ex, "linalg.inv", "singular"),
    aten.inverse.default: _with_info_check(torch.linalg.inv_ex, "inverse", "singular"),
    aten.linalg_solve.default: _with_info_check(torch.linalg.solve_ex, "linalg.solve", "singular"),
}
"""Operator -> its replacement while a graph is differentiated, called with the operator's own
arguments.
"""
