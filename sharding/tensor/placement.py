"""Placement of the values of a partitioned graph, and the collectives that move them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.fx import Graph, Node

from trainload.autograd_trace.graph_calls import append
from trainload.sharding.tensor.factors import Dims, Factor, Factors, Size

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Unsharded(Enum):
    """Placement of a value that is not sharded."""

    WHOLE = "whole"
    """Each rank has all of it."""
    TERM = "term"
    """Each rank has a term; the value is their sum."""


Place = Unsharded | Factor
"""A `Factor` means that each rank has its share of that factor."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective that a partitioned graph needs for a value.

    Attributes:
        node: name of the value's node in the step graph.
        collective: name of the collective operator.
        elements: elements of the value on one rank afterwards, in the example batch.
        item: bytes of one element.
        by_rows: True if the number of elements grows with the rows.
    """

    node: str
    collective: str
    elements: int
    item: int
    by_rows: bool

    def sent(self, ranks: int, scale: float) -> float:
        """Return the bytes that one rank sends, with ring algorithms, for `scale` times the example
        batch's rows.
        """
        whole = self.elements * (ranks if self.collective == "reduce_scatter" else 1)
        rounds = 2 if self.collective == "all_reduce" else 1
        return rounds * whole * self.item * (scale if self.by_rows else 1.0) * (ranks - 1) / ranks


class Emitter:
    """Builder that appends nodes with fake values to a graph, and moves values between the ranks of
    one group.

    Args:
        graph: graph to build.
        mode: the fake mode of its values.
        ranks: number of ranks in the group.
        group: its logical name.
        rank: the 0-dim int64 input with this rank's index in the group.
    """

    def __init__(self, graph: Graph, mode: Any, ranks: int, group: str, rank: Node) -> None:
        self.graph, self.ranks, self.group, self.rank = graph, ranks, group, rank
        self._mode = mode
        self._row: Node | None = None

    def call(
        self, target: Callable[..., Any], *args: Any, like: Node | None = None, **kwargs: Any
    ) -> Node:
        """Append a call. `like`: a node whose metadata it inherits."""
        node = append(self.graph, self._mode, target, *args, **kwargs)
        if like is not None:
            node.meta = {**like.meta, "val": node.meta["val"]}
        return node

    def sizes(self, node: Node) -> list[Any]:
        """Return a tensor's sizes: numbers, or nodes that compute them."""
        shape = node.meta["val"].shape
        return [
            size if isinstance(size, int) else self.call(aten.sym_size.int, node, at)
            for at, size in enumerate(shape)
        ]

    def times(self, size: Any, factor: int) -> Any:
        """Return size * factor, where size may be a node."""
        return size * factor if isinstance(size, int) else self.call(operator.mul, size, factor)

    def part(self, size: Any, divisor: int) -> Any:
        """Return size / divisor, where size may be a node, or -1."""
        if isinstance(size, int):
            assert size == -1 or size % divisor == 0
            return size if size == -1 else size // divisor
        return self.call(operator.floordiv, size, divisor)

    def wait(self, in_flight: Node) -> Node:
        """Return the result of a collective."""
        return self.call(c10d.wait_tensor.default, in_flight)

    def reduced(self, value: Node, how: str = "sum") -> Node:
        """Return the reduction of a value over all ranks."""
        return self.wait(self.call(c10d.all_reduce.default, value, how, self.group))

    def gathered(self, value: Node, layout: ShareLayout) -> Node:
        """Return the whole value from all shares with this layout."""
        sizes, at = self.sizes(value), layout.dim
        packed = self.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        in_flight = self.call(c10d.all_gather_into_tensor.default, packed, self.ranks, self.group)
        split = [*sizes[:at], *self._halves(sizes[at], layout, 1), *sizes[at + 1 :]]
        apart = self.call(aten.reshape.default, self.wait(in_flight), [self.ranks, *split])
        order = [*range(1, at + 2), 0, *range(at + 2, len(split) + 1)]
        return self._reshape(
            self.call(aten.permute.default, apart, order),
            [*sizes[:at], self.times(sizes[at], self.ranks), *sizes[at + 1 :]],
        )

    def own_share(self, value: Node, layout: ShareLayout) -> Node:
        """Return this rank's share of a value."""
        sizes, at = self.sizes(value), layout.dim
        apart = self._split_shares(value, sizes, layout)
        own = self.call(aten.index_select.default, apart, at + 1, self._rank_row())
        return self._reshape(own, [*sizes[:at], self.part(sizes[at], self.ranks), *sizes[at + 1 :]])

    def scattered(self, term: Node, layout: ShareLayout) -> Node:
        """Return this rank's share of the sum of all terms."""
        sizes, at = self.sizes(term), layout.dim
        apart = self._split_shares(term, sizes, layout)
        order = [at + 1, *range(at + 1), *range(at + 2, len(sizes) + 2)]
        packed = self.call(
            aten.clone.default,
            self.call(aten.permute.default, apart, order),
            memory_format=torch.contiguous_format,
        )
        own = self.wait(
            self.call(c10d.reduce_scatter_tensor.default, packed, "sum", self.ranks, self.group)
        )
        return self._reshape(own, [*sizes[:at], self.part(sizes[at], self.ranks), *sizes[at + 1 :]])

    def offset(self, length: int) -> Node:
        """Return the number of elements before this rank's (0-dim int64), where each rank has
        `length`.
        """
        return self.call(aten.mul.Tensor, self.rank, length)

    def only_first(self, value: Node) -> Node:
        """Return the value on rank 0 of the group, and zero on the others."""
        first = self.call(aten.eq.Scalar, self.rank, 0)
        return self.call(
            aten.mul.Tensor,
            value,
            self.call(aten._to_copy.default, first, dtype=value.meta["val"].dtype),
        )

    def _split_shares(self, value: Node, sizes: Sequence[Any], layout: ShareLayout) -> Node:
        before, after = self._halves(sizes[layout.dim], layout, self.ranks)
        return self.call(
            aten.reshape.default,
            value,
            [*sizes[: layout.dim], before, self.ranks, after, *sizes[layout.dim + 1 :]],
        )

    def _halves(self, size: Any, layout: ShareLayout, shares: int) -> tuple[Any, Any]:
        """Return, for a dim of this number of shares, how often a share begins in it, and how many
        of its elements follow in a row.
        """
        if isinstance(layout.row, int):
            return self.part(size, layout.row * shares), layout.row
        assert isinstance(layout.before, int), layout
        return layout.before, self.part(size, layout.before * shares)

    def _reshape(self, value: Node, sizes: list[Any]) -> Node:
        return self.call(aten.reshape.default, value, sizes)

    def _rank_row(self) -> Node:
        if self._row is None:
            self._row = self.call(aten.view.default, self.rank, [1])
        return self._row


@dataclass(frozen=True, slots=True)
class ShareLayout:
    """Layout of shares of a factor in a tensor: in its dim `dim`, each has `before` times `row`
    elements, of which `row` are adjacent.

    At least one of `before` and `row` is a number; the other may be an expression of symbols.
    """

    dim: int
    before: Size
    row: Size


def position(factors: Factors, dims: Dims, factor: Factor, ranks: int) -> ShareLayout | None:
    """Return the layout of the shares that `ranks` ranks have of a factor in a tensor; None if the
    tensor does not have the factor.
    """
    for at, dim in enumerate(dims):
        leaves = factors.leaves(dim)
        if factor in leaves:
            number = leaves.index(factor)
            before, after = (
                math.prod(leaf.size for leaf in part)
                for part in (leaves[:number], leaves[number + 1 :])
            )
            return ShareLayout(at, before, after * (factor.size // ranks))
    return None
