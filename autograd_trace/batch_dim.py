"""Finds the dim of a random value that runs over the rows of the batch, so that its numbers do not depend on how a batch was split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from trainload.autograd_trace.random import Size
from trainload.capture.errors import CaptureError
from trainload.capture.operators import is_overload

aten = torch.ops.aten
_RESHAPES = frozenset({"view", "reshape", "flatten", "_unsafe_view", "unflatten", "view_copy"})


def batch_dim_of(node: Node, batch: Size, where: str) -> int | None:
    """The dim of a node's value that runs over the rows; None if there is none, or the number of rows is fixed (`RandomKey.of_call`).

    Raises:
        CaptureError: the rows are mixed into a dim in a way that a split of the batch would change.
    """
    shape = _shape(node)
    if isinstance(batch, int):
        return None
    dim = find_batch_dim(shape, batch, where)
    if dim is not None and str(shape[dim]) != str(batch) and not _rows_outermost(node, str(shape[dim]), batch):
        raise CaptureError(
            f"a random value's dim {dim} has the batch as an inner part of its {shape[dim]} entries, so that its numbers would depend on "
            "how the batch is split over workers",
            where=where,
            cure="Merge dims with the batch first (x.transpose(0, 1).flatten(0, 1)), or apply the dropout before they are merged.",
        )
    return dim


def find_batch_dim(shape: Sequence[Size], batch: torch.SymInt, where: str) -> int | None:
    """The first dim of `shape` that is a multiple of the batch size; None if there is none.

    Raises:
        CaptureError: a dim depends on the batch size and is no multiple of it.
    """
    symbol = batch.node.expr
    for dim, size in enumerate(shape):
        if not isinstance(size, int) and size.node.expr.has(symbol):
            if (size.node.expr / symbol).has(symbol):
                raise CaptureError(
                    f"a random value's dim {dim} has {size} entries, which is not a whole number for each of the {batch} rows",
                    where=where,
                    cure="Draw the random tensor with the batch as a dim of its own.",
                )
            return dim
    return None


def _shape(node: Node) -> Sequence[Size]:
    value = node.meta["val"]
    shape: Sequence[Size] = value.shape if isinstance(value, Tensor) else value[0].shape
    return shape


def _rows_outermost(node: Node, merged: str, batch: torch.SymInt) -> bool:
    """Whether, in the reshape that made the dim of size `merged`, the batch stood before the dims that it was merged with.

    Looks back through values that have a dim of that size. Where none was merged by a reshape, it holds (an embedding's rows, say).
    """
    seen: set[Node] = set()
    stack = [node]
    while stack:
        here = stack.pop()
        if here in seen:
            continue
        seen.add(here)
        for source in here.all_input_nodes:
            value = source.meta.get("val")
            if not isinstance(value, Tensor):
                continue
            if any(str(size) == merged for size in value.shape):
                stack.append(source)
            elif _is_reshape(here) and any(str(size) == merged for size in _shape(here)):
                before = [size for size in value.shape if str(size) != "1"]
                place = next((i for i, size in enumerate(before) if _depends(size, batch)), 0)
                made = [size for size in _shape(here) if str(size) != "1"]
                if place != next(i for i, size in enumerate(made) if str(size) == merged):
                    return False
    return True


def _depends(size: Size, batch: torch.SymInt) -> bool:
    return not isinstance(size, int) and bool(size.node.expr.has(batch.node.expr))


def _is_reshape(node: Node) -> bool:
    return is_overload(node.target) and node.target.overloadpacket.__name__ in _RESHAPES
