"""Find the rows of a batch to which elements of a value belong, by the value's symbolic shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import SymInt, Tensor
from torch.fx import Node

from trainload.autograd_trace.graphs import Port, Role


def row_symbol(inputs: Mapping[Node, Port]) -> str | None:
    """Return the symbol of the number of rows of a graph's batch; None if it is a constant."""
    for node, port in inputs.items():
        shape = node.meta["val"].shape if port.role is Role.BATCH else ()
        if shape and isinstance(shape[0], SymInt) and shape[0].node.expr.is_Symbol:
            return str(shape[0].node.expr)
    return None


def rows_with(bad: Tensor, shape: Sequence[int | SymInt], symbol: str, rows: int) -> list[int]:
    """Return the rows of the batch with an element that is True; [] if no dim holds rows.

    A dim of a multiple of the number of rows holds the rows one after the other, as a batch of
    sequences whose first two dims were flattened.

    Args:
        bad: boolean tensor.
        shape: its symbolic shape.
        symbol: symbol of the number of rows.
        rows: the number of rows.
    """
    for dim, size in enumerate(shape):
        if not isinstance(size, SymInt) or not rows or bad.shape[dim] % rows:
            continue
        if symbol in {str(each) for each in size.node.expr.free_symbols}:
            others = [each for each in range(bad.ndim) if each != dim]
            hit = bad.any(dim=tuple(others)) if others else bad
            return hit.view(rows, -1).any(1).nonzero().flatten().tolist()
    return []
