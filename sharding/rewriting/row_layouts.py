"""Layouts of tensors whose rows are computed a part at a time.

A tensor of rows has one or several dims that count rows, such as (batch, position, ...). An
operator works by row if each row of its result needs the same row of its operands only, so that the
result for some rows can be computed from these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import SymInt
from torch.fx import Node


class Form(Enum):
    """The dims of a value that count rows."""

    ROWS = "rows"
    """The leading ones. A part has shape (rows of the part, ...)."""
    CHANNELS = "channels"
    """All but the second one. A part has shape (rows of the part, channels)."""
    TRANSPOSED = "transposed"
    """The last of two. A part has shape (width, rows of the part)."""
    SUM = "sum"
    """None: it is a sum over all rows. A part has the sum over its rows."""


class Space(Enum):
    """The rows of a value, if the graph selects some of them, such as all positions but the last.

    Without a selection, there is only ALL.
    """

    ALL = "all"
    """All rows. Only those that are selected are computed."""
    SELECTED = "selected"
    PADDED = "padded"
    """All rows, of which those that are not selected are 0."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The dims of a value that count rows. `lead`: for ROWS, their number."""

    form: Form
    lead: int = 1
    space: Space = Space.ALL


class Emit(Protocol):
    """Appends calls for one part of the rows to a graph."""

    @property
    def rows(self) -> Node | int:
        """Number of rows of the part."""

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Append a call."""


ValueOf = Callable[[Node], Node]
"""Return the part of an operand."""


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call that works by row, or sums over rows.

    Attributes:
        layout: of its result.
        operands: operand -> its layout; None for one that every row needs whole.
        make: appends the call for the parts of the operands.
        averaged: if the result is a mean over all rows, the number of elements of a row that are
            added for each element of the result; otherwise 0.
    """

    layout: Layout
    operands: Mapping[Node, Layout | None]
    make: Callable[[Emit, ValueOf], Node]
    averaged: int = 0


class NotByRowError(Exception):
    """A call needs several rows at once."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.name} ({node.target}) {reason}")


def is_same_size(left: Any, right: Any) -> bool:
    """Return True if two sizes have the same expression."""
    return bool(_expression(left) == _expression(right))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, SymInt) else size


def row_dims(layout: Layout, ndim: int) -> list[int]:
    """Return the dims that count rows."""
    match layout.form:
        case Form.ROWS:
            return list(range(layout.lead))
        case Form.CHANNELS:
            return [0, *range(2, ndim)]
        case Form.TRANSPOSED:
            return [ndim - 1]
        case Form.SUM:
            return []


def leading(shape: Sequence[Any], count: Any) -> int | None:
    """Return how many leading dims have this number of elements; None if none have."""
    for lead in range(1, len(shape) + 1):
        if is_same_size(product_of(shape[:lead]), count):
            return lead
    return None


def product_of(sizes: Iterable[Any]) -> Any:
    """Return the product of sizes."""
    product: Any = 1
    for size in sizes:
        product = product * size
    return product
