"""Where the values of a partitioned graph lie, and the collectives that move them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.fx import Graph, Node

from trainload.sharding.analysis.graph_nodes import append
from trainload.sharding.tensor.factors import Dims, Factor, Factors, Size

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Held(Enum):
    """How ranks hold a value that is not sharded."""

    WHOLE = "whole"
    """Each has all of it."""
    TERM = "term"
    """Each has a term; the value is their sum."""


Place = Held | Factor
"""A factor: each rank has its share of that factor."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective that a partitioned graph needs for a value.

    node: the value's, in the step graph. collective: its operator's name. elements: of the value as one rank has it afterwards, in the
    example batch. item: bytes of one. by_rows: whether there are more of them for more rows.
    """

    node: str
    collective: str
    elements: int
    item: int
    by_rows: bool

    def sent(self, ranks: int, scale: float) -> float:
        """Bytes that one rank sends, by ring algorithms, where there are `scale` times the example batch's rows."""
        whole = self.elements * (ranks if self.collective == "reduce_scatter" else 1)
        rounds = 2 if self.collective == "all_reduce" else 1
        return rounds * whole * self.item * (scale if self.by_rows else 1.0) * (ranks - 1) / ranks


class Emitter:
    """Appends nodes to a graph, with the values that a fake mode finds for them, and moves values between the ranks of one group.

    Args:
        graph: that is made.
        mode: the fake mode of its values.
        ranks: how many there are in the group.
        group: its logical name.
        rank: the 0-dim int64 input that says which of them this one is.
    """

    def __init__(self, graph: Graph, mode: Any, ranks: int, group: str, rank: Node) -> None:
        self.graph, self.ranks, self.group, self.rank = graph, ranks, group, rank
        self._mode = mode
        self._row: Node | None = None

    def call(self, target: Callable[..., Any], *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """Appends a call. `like`: a node whose record of its origin it takes."""
        node = append(self.graph, self._mode, target, *args, **kwargs)
        if like is not None:
            node.meta = {**like.meta, "val": node.meta["val"]}
        return node

    def sizes(self, node: Node) -> list[Any]:
        """A tensor's sizes: numbers, or nodes that tell them."""
        shape = node.meta["val"].shape
        return [size if isinstance(size, int) else self.call(aten.sym_size.int, node, at) for at, size in enumerate(shape)]

    def times(self, size: Any, factor: int) -> Any:
        """Size * factor, where size may be a node."""
        return size * factor if isinstance(size, int) else self.call(operator.mul, size, factor)

    def part(self, size: Any, divisor: int) -> Any:
        """Size / divisor, where size may be a node, or -1."""
        if isinstance(size, int):
            assert size == -1 or size % divisor == 0
            return size if size == -1 else size // divisor
        return self.call(operator.floordiv, size, divisor)

    def wait(self, flying: Node) -> Node:
        """What a collective has brought."""
        return self.call(c10d.wait_tensor.default, flying)

    def reduced(self, value: Node, how: str = "sum") -> Node:
        """Of all ranks together."""
        return self.wait(self.call(c10d.all_reduce.default, value, how, self.group))

    def gathered(self, value: Node, lie: Lie) -> Node:
        """All shares of a value that lie so in it."""
        sizes, at = self.sizes(value), lie.dim
        packed = self.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        flying = self.call(c10d.all_gather_into_tensor.default, packed, self.ranks, self.group)
        split = [*sizes[:at], *self._halves(sizes[at], lie, 1), *sizes[at + 1 :]]
        apart = self.call(aten.reshape.default, self.wait(flying), [self.ranks, *split])
        order = [*range(1, at + 2), 0, *range(at + 2, len(split) + 1)]
        return self._joined(
            self.call(aten.permute.default, apart, order), [*sizes[:at], self.times(sizes[at], self.ranks), *sizes[at + 1 :]]
        )

    def own_share(self, value: Node, lie: Lie) -> Node:
        """The share that this rank has of a value."""
        sizes, at = self.sizes(value), lie.dim
        apart = self._apart(value, sizes, lie)
        own = self.call(aten.index_select.default, apart, at + 1, self._rank_row())
        return self._joined(own, [*sizes[:at], self.part(sizes[at], self.ranks), *sizes[at + 1 :]])

    def scattered(self, term: Node, lie: Lie) -> Node:
        """The share that this rank has of the sum of all terms."""
        sizes, at = self.sizes(term), lie.dim
        apart = self._apart(term, sizes, lie)
        order = [at + 1, *range(at + 1), *range(at + 2, len(sizes) + 2)]
        packed = self.call(aten.clone.default, self.call(aten.permute.default, apart, order), memory_format=torch.contiguous_format)
        own = self.wait(self.call(c10d.reduce_scatter_tensor.default, packed, "sum", self.ranks, self.group))
        return self._joined(own, [*sizes[:at], self.part(sizes[at], self.ranks), *sizes[at + 1 :]])

    def offset(self, length: int) -> Node:
        """0-dim int64: how many elements lie before this rank's, where each has `length`."""
        return self.call(aten.mul.Tensor, self.rank, length)

    def only_first(self, value: Node) -> Node:
        """The value on rank 0 of the group, zero on the others."""
        first = self.call(aten.eq.Scalar, self.rank, 0)
        return self.call(aten.mul.Tensor, value, self.call(aten._to_copy.default, first, dtype=value.meta["val"].dtype))

    def _apart(self, value: Node, sizes: Sequence[Any], lie: Lie) -> Node:
        before, after = self._halves(sizes[lie.dim], lie, self.ranks)
        return self.call(aten.reshape.default, value, [*sizes[: lie.dim], before, self.ranks, after, *sizes[lie.dim + 1 :]])

    def _halves(self, size: Any, lie: Lie, shares: int) -> tuple[Any, Any]:
        """A dim of so many shares: how often one begins in it, and how many of its elements then come in a row."""
        if isinstance(lie.row, int):
            return self.part(size, lie.row * shares), lie.row
        assert isinstance(lie.before, int), lie
        return lie.before, self.part(size, lie.before * shares)

    def _joined(self, value: Node, sizes: list[Any]) -> Node:
        return self.call(aten.reshape.default, value, sizes)

    def _rank_row(self) -> Node:
        if self._row is None:
            self._row = self.call(aten.view.default, self.rank, [1])
        return self._row


@dataclass(frozen=True, slots=True)
class Lie:
    """Where shares of a factor lie in a tensor: in its dim `dim`, of `before` times `row` elements each; `row` of one come in a row. One of
    the two at least is a number, the other perhaps an expression of symbols.
    """

    dim: int
    before: Size
    row: Size


def position(factors: Factors, dims: Dims, factor: Factor, ranks: int) -> Lie | None:
    """Where the shares that `ranks` ranks have of a factor lie in a tensor. None: nowhere."""
    for at, dim in enumerate(dims):
        leaves = factors.leaves(dim)
        if factor in leaves:
            number = leaves.index(factor)
            before, after = (math.prod(leaf.size for leaf in part) for part in (leaves[:number], leaves[number + 1 :]))
            return Lie(at, before, after * (factor.size // ranks))
    return None
