"""Find how the rows of the batch are laid out in a random value, so that its numbers do not depend
on how a batch was split.

Rows of stacked views of a batch cannot be numbered by their places in the stack: two workers would
draw other masks than one. So the layout is traced back, through regions too, to the operator that
stacked or merged the rows, and the numbers follow the row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.randomness.keyed import KEYED
from trainload.autograd_trace.randomness.random_key import Size
from trainload.capture.operators import bodies_of, graphs_in, is_overload
from trainload.capture.watching.higher_order import CHECKPOINT, SELECTIVE
from trainload.core.errors import CaptureError

_HOP = torch.ops.higher_order
_WITH_BODIES = (
    _HOP.wrap_with_autocast,
    _HOP.wrap_with_set_grad_enabled,
    CHECKPOINT,
    SELECTIVE,
    *KEYED,
)
"""Operators whose bodies receive the operator's last arguments, or one entry of them per
iteration.
"""
_RESHAPES = frozenset({"view", "reshape", "flatten", "_unsafe_view", "unflatten", "view_copy"})
_STACKS = frozenset({"cat", "concat", "concatenate", "vstack", "row_stack"})
_REPEATS = frozenset({"repeat", "tile"})


@dataclass(frozen=True, slots=True)
class Rows:
    """Layout of the rows of the batch in a value.

    Attributes:
        dim: the dim that runs over them.
        stacks: number of times that all rows follow one another in it: 2 for two stacked views of a
            batch. Each row may own several adjacent entries in each.
    """

    dim: int
    stacks: int


def find_batch_dim(shape: Sequence[Size], batch: torch.SymInt, where: str) -> int | None:
    """Return the first dim of `shape` that is a multiple of the batch size; None if there is none.

    Raises:
        CaptureError: a dim depends on the batch size but is not a multiple of it.
    """
    symbol = batch.node.expr
    for dim, size in enumerate(shape):
        if not isinstance(size, int) and size.node.expr.has(symbol):
            if (size.node.expr / symbol).has(symbol):
                raise CaptureError(
                    f"dim {dim} of a random tensor has {size} entries, which is not a multiple of"
                    f" the {batch} rows",
                    where=where,
                    hint="Draw the random tensor with the batch as a separate dim.",
                )
            return dim
    return None


class Layout:
    """Layout of rows in the values of a captured graph and its nested graphs. Results are cached by
    node.

    Args:
        module: the graph.
        batch: the number of rows as `node.meta["val"]` spells it: a SymInt, or an int if it is
            fixed.
    """

    def __init__(self, module: GraphModule, batch: Size) -> None:
        self._module = module
        self._batch: Any = batch
        self._stacks_by_size: dict[tuple[Node, str], set[int | None]] = {}

    def rows(self, node: Node, where: str) -> Rows | None:
        """Return the layout of the rows in a node's value; None if it has no rows, or their number
        is fixed (`RandomKey.of_call`).

        Raises:
            CaptureError: the rows are mixed into a dim in a way that a split of the batch would
                change.
        """
        if isinstance(self._batch, int):
            return None
        value = node.meta["val"]
        shape = value.shape if isinstance(value, Tensor) else value[0].shape
        dim = find_batch_dim(shape, self._batch, where)
        if dim is None:
            return None
        stacks = self._stacks(node, str(shape[dim]))
        if stacks is None:
            raise CaptureError(
                f"dim {dim} of a random tensor has the batch as an inner part of its {shape[dim]}"
                " entries, so its values would depend on how the batch is split over workers",
                where=where,
                hint=(
                    "Merge dims with the batch first (x.transpose(0, 1).flatten(0, 1)), or apply"
                    " the dropout before they are merged."
                ),
            )
        return Rows(dim, stacks)

    def _stacks(self, node: Node, merged: str) -> int | None:
        """Return `Rows.stacks` of a dim of size `merged`; None if the rows are laid out otherwise,
        or in several ways.

        If no operator is known to have made the dim, each row's entries are assumed adjacent (an
        embedding's rows, say).
        """
        if merged == str(self._batch):
            return 1
        stacks = self._possible_stacks(node, merged) or {1}
        return next(iter(stacks)) if len(stacks) == 1 else None

    @cached_property
    def _through_bodies(self) -> dict[Node, list[Node]]:
        """Inputs of bodies -> the operator's arguments, and results of the operator -> the values
        that its bodies return.
        """
        sources: dict[Node, list[Node]] = {}
        for part in graphs_in(self._module):
            for node in part.graph.nodes:
                if node.target not in _WITH_BODIES:
                    continue
                arguments = [
                    a
                    for value in node.args
                    for a in (value if isinstance(value, list | tuple) else [value])
                ]
                for body in bodies_of(part, node).values():
                    inputs = body.graph.find_nodes(op="placeholder")
                    operands = arguments[len(arguments) - len(inputs) :]
                    for inner, outer in zip(inputs, operands, strict=True):
                        if isinstance(outer, Node):
                            sources.setdefault(inner, []).append(outer)
                    returned: Any = body.graph.output_node().args[0]
                    for user in node.users:
                        if user.target is operator.getitem and isinstance(
                            returned[user.args[1]], Node
                        ):
                            sources.setdefault(user, []).append(returned[user.args[1]])
        return sources

    def _possible_stacks(self, node: Node, merged: str) -> set[int | None]:
        key = (node, merged)
        if key not in self._stacks_by_size:
            self._stacks_by_size[key] = set()
            sources = [
                n
                for n in self._through_bodies.get(node, node.all_input_nodes)
                if isinstance(n.meta.get("val"), Tensor)
            ]
            carriers = [
                n for n in sources if any(str(size) == merged for size in n.meta["val"].shape)
            ]
            for source in carriers:
                self._stacks_by_size[key] |= self._possible_stacks(source, merged)
            if (
                not carriers
                and isinstance(node.meta.get("val"), Tensor)
                and is_overload(node.target)
            ):
                self._stacks_by_size[key] |= self._stacks_made_by(node, merged)
        return self._stacks_by_size[key]

    def _stacks_made_by(self, node: Node, merged: str) -> set[int | None]:
        """Return the stacks of a dim that this node made, or an empty set."""
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]  # an overload
        shape = [str(size) for size in node.meta["val"].shape]
        if merged not in shape:
            return set()
        if name in _STACKS:
            parts: Any = node.args[0]
            sizes = [part.meta["val"].shape[shape.index(merged)] for part in parts]
            if len(set(map(str, sizes))) > 1 or not self._depends_on_batch(sizes[0]):
                return {None}
            return {self._multiply(len(parts), self._stacks(part, str(sizes[0]))) for part in parts}
        if name in _REPEATS:
            source: Any = node.args[0]
            place, times = shape.index(merged) - len(shape), list(node.args[1])  # type: ignore[arg-type]  # a list
            size, count = (
                source.meta["val"].shape[place],
                times[place] if -place <= len(times) else 1,
            )
            return {self._multiply(count, self._stacks(source, str(size)))}
        return {self._stacks_after_merge(node, merged)} if name in _RESHAPES else set()

    def _stacks_after_merge(self, node: Node, merged: str) -> int | None:
        """Return the stacks of a dim that a reshape merged: dims before the one with the rows
        count, later ones are a row's own.
        """
        source: Any = node.args[0]
        before = [size for size in source.meta["val"].shape if str(size) != "1"]
        after = [size for size in node.meta["val"].shape if str(size) != "1"]
        place = next((i for i, size in enumerate(before) if self._depends_on_batch(size)), None)
        if place is None:
            return 1
        outside = str(
            math.prod(after[: next(i for i, size in enumerate(after) if str(size) == merged)])
        )
        for first in range(place + 1):
            if str(math.prod(before[:first])) == outside:
                return self._multiply(
                    math.prod(before[first:place]), self._stacks(source, str(before[place]))
                )
        return None

    def _multiply(self, count: Size, stacks: int | None) -> int | None:
        return count * stacks if isinstance(count, int) and stacks is not None else None

    def _depends_on_batch(self, size: Size) -> bool:
        return not isinstance(size, int) and bool(size.node.expr.has(self._batch.node.expr))
