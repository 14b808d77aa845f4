"""Elements of operators' results, from elements of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from trainload.capture.operators import is_overload

_aten = torch.ops.aten


class Run(Protocol):
    """Interface of an evaluation that the rules use."""

    def at(self, node: Node, index: Tensor) -> Tensor:
        """Return elements of a node, flattened: int64 (n,) -> (n,)."""

    def broadcast(self, node: Node, shape: Sequence[int], index: Tensor) -> Tensor:
        """Return elements of a node that is broadcast to a shape: int64 (n,) -> (n,), or () for a
        node without dims.
        """


def is_pointwise(node: Node) -> bool:
    """Return True if an operator computes an element from the same elements of its arguments."""
    return is_overload(node.target) and torch.Tag.pointwise in node.target.tags


def _coordinates(index: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the coordinates of elements, outermost first."""
    coordinates = []
    for size in reversed(shape):
        divisor = max(size, 1)  # the index of a tensor without elements is empty, or not used
        coordinates.append(index % divisor)
        index = index // divisor
    return coordinates[::-1]


def _linear(coordinates: Sequence[Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
    index = torch.zeros_like(like)
    for coordinate, size in zip(coordinates, shape, strict=True):
        index = index * size + coordinate
    return index


def moves(node: Node) -> list[tuple[Node, bool]]:
    """Return the arguments whose elements an operator with a rule reads, each with True if it needs
    other places of them than of its result.
    """
    shape = node.meta["val"].shape
    rule = RULES.get(node.target)
    if node.op == "placeholder" or rule in (_never_written, _constant, _constant_like):
        return []
    if rule is _same:
        return [(_node(node.args[0]), False)]
    if rule in (_select_scatter, _slice_scatter):
        return [(_node(node.args[0]), False), (_node(node.args[1]), True)]
    if rule is _copy or rule is None:
        read = [_node(node.args[1])] if rule is _copy else node.all_input_nodes
        return [(source, source.meta["val"].shape != shape) for source in read]
    return [(_node(node.args[0]), True)]


def broadcast_index(index: Tensor, shape: Sequence[int], own: Sequence[int]) -> Tensor:
    """Return the places of elements in a tensor of shape `own` that is broadcast to `shape`."""
    coordinates = _coordinates(index, shape)[len(shape) - len(own) :]
    kept = [
        torch.zeros_like(index) if size == 1 else coordinate
        for coordinate, size in zip(coordinates, own, strict=True)
    ]
    return _linear(kept, own, index)


def _same(run: Run, node: Node, index: Tensor) -> Tensor:
    """Return elements of an operator that keeps their order."""
    return run.at(_node(node.args[0]), index).to(node.meta["val"].dtype)


def never_written(dtype: torch.dtype) -> Tensor:
    """Return the value of elements that nothing was written to: NaN, or 0 where there is none."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype)


def _never_written(_: Run, node: Node, index: Tensor) -> Tensor:
    return never_written(node.meta["val"].dtype).expand(index.shape)


def _constant(_: Run, node: Node, index: Tensor) -> Tensor:
    """Return elements of a tensor of equal elements, whose shape is the first argument."""
    operator: Any = node.target
    single: Tensor = operator([1], *node.args[1:], **node.kwargs)
    return single.expand(index.shape)


def _constant_like(_: Run, node: Node, index: Tensor) -> Tensor:
    """Return elements of a tensor of equal elements, made like another one."""
    operator: Any = node.target
    like = torch.empty(1, dtype=node.meta["val"].dtype)
    single: Tensor = operator(like, *node.args[1:])
    return single.expand(index.shape)


def _copy(run: Run, node: Node, index: Tensor) -> Tensor:
    value = node.meta["val"]
    return (
        run.broadcast(_node(node.args[1]), value.shape, index).to(value.dtype).expand(index.shape)
    )


def _expand(run: Run, node: Node, index: Tensor) -> Tensor:
    return run.broadcast(_node(node.args[0]), node.meta["val"].shape, index).expand(index.shape)


def _permuted(order: Callable[[Node], Sequence[int]]) -> Callable[..., Tensor]:
    def rule(run: Run, node: Node, index: Tensor) -> Tensor:
        source = _node(node.args[0])
        coordinates = _coordinates(index, node.meta["val"].shape)
        dims = order(node)
        own = [coordinates[dims.index(dim)] for dim in range(len(dims))]
        return run.at(source, _linear(own, source.meta["val"].shape, index))

    return rule


def _permute_order(node: Node) -> list[int]:
    dims: Any = node.args[1]
    return [dim % len(dims) for dim in dims]


def _transpose_order(node: Node) -> list[int]:
    rank = node.meta["val"].dim()
    order = list(range(rank))
    args: Sequence[Any] = node.args
    first, second = (int(dim) % rank for dim in args[1:3])
    order[first], order[second] = order[second], order[first]
    return order


def _t_order(node: Node) -> list[int]:
    return list(range(node.meta["val"].dim()))[::-1]


def _select(run: Run, node: Node, index: Tensor) -> Tensor:
    source = _node(node.args[0])
    shape = source.meta["val"].shape
    dim, place = _dim_and_place(node, shape, 1)
    coordinates = _coordinates(index, node.meta["val"].shape)
    coordinates.insert(dim, torch.full_like(index, place))
    return run.at(source, _linear(coordinates, shape, index))


def _select_scatter(run: Run, node: Node, index: Tensor) -> Tensor:
    base, source = _node(node.args[0]), _node(node.args[1])
    shape = base.meta["val"].shape
    dim, place = _dim_and_place(node, shape, 2)
    coordinates = _coordinates(index, shape)
    chosen = coordinates.pop(dim) == place
    own = _linear(coordinates, source.meta["val"].shape, index)
    return torch.where(chosen, run.at(source, own), run.at(base, index))


def _dim_and_place(node: Node, shape: Sequence[int], first: int) -> tuple[int, int]:
    args: Sequence[Any] = node.args
    dim, place = (int(each) for each in args[first : first + 2])
    dim %= len(shape)
    return dim, place % shape[dim]


def _slice(run: Run, node: Node, index: Tensor) -> Tensor:
    source = _node(node.args[0])
    shape = source.meta["val"].shape
    dim, start, _, step = _bounds(node, shape, 1)
    coordinates = _coordinates(index, node.meta["val"].shape)
    coordinates[dim] = coordinates[dim] * step + start
    return run.at(source, _linear(coordinates, shape, index))


def _slice_scatter(run: Run, node: Node, index: Tensor) -> Tensor:
    base, source = _node(node.args[0]), _node(node.args[1])
    if not source.meta["val"].numel():
        return run.at(base, index)
    shape = base.meta["val"].shape
    dim, start, stop, step = _bounds(node, shape, 2)
    coordinates = _coordinates(index, shape)
    own = coordinates[dim] - start
    chosen = (own >= 0) & (coordinates[dim] < stop) & (own % step == 0)
    coordinates[dim] = torch.where(chosen, own // step, 0)
    inside = _linear(coordinates, source.meta["val"].shape, index)
    return torch.where(chosen, run.at(source, inside), run.at(base, index))


def _bounds(node: Node, shape: Sequence[int], first: int) -> tuple[int, int, int, int]:
    """Return dim, start, stop and step of a slice."""
    given: list[Any] = [*node.args[first:], *[None] * 4][:4]
    named: Mapping[str, Any] = node.kwargs
    names = ("dim", "start", "end", "step")
    dim, start, stop, step = (
        named.get(name) if value is None else value
        for name, value in zip(names, given, strict=True)
    )
    dim = int(dim or 0) % len(shape)
    return dim, *slice(start, stop, step).indices(shape[dim])


def _node(argument: Any) -> Node:
    assert isinstance(argument, Node)
    return argument


EMPTY = frozenset({_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default})
"""Operators whose result is not written yet."""
RULES: Mapping[Any, Callable[[Run, Node, Tensor], Tensor]] = {
    **dict.fromkeys(
        (
            _aten.view.default,
            _aten._unsafe_view.default,
            _aten.reshape.default,
            _aten.unsqueeze.default,
            _aten.squeeze.default,
            _aten.squeeze.dim,
            _aten.squeeze.dims,
            _aten.clone.default,
            _aten.detach.default,
            _aten.alias.default,
            _aten.lift_fresh_copy.default,
            _aten._to_copy.default,
        ),
        _same,
    ),
    **dict.fromkeys(EMPTY, _never_written),
    **dict.fromkeys((_aten.full.default, _aten.zeros.default, _aten.ones.default), _constant),
    **dict.fromkeys(
        (_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default), _constant_like
    ),
    _aten.copy.default: _copy,
    _aten.expand.default: _expand,
    _aten.permute.default: _permuted(_permute_order),
    _aten.transpose.int: _permuted(_transpose_order),
    _aten.t.default: _permuted(_t_order),
    _aten.select.int: _select,
    _aten.select_scatter.default: _select_scatter,
    _aten.slice.Tensor: _slice,
    _aten.slice_scatter.default: _slice_scatter,
}
"""Operator -> its elements."""
