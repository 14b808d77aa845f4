"""Find the value of a batch that an operator rejected: a token outside the vocabulary, an invalid
label, a singular matrix.

Only the rejected value is computed again, on the CPU, from the batch and constants. So any rank can
do it without parameters, and without the GPU, which an out-of-range index makes unusable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.operators import is_overload
from trainload.sharding.analysis.graph_nodes import arguments, computed_from, ends
from trainload.sharding.analysis.node_costs import number
from trainload.sharding.pipeline.sizes import symbols_of

aten = torch.ops.aten
_MAX_SHOWN = 8
"""Maximum number of elements of a value that an error shows."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A value that an operator rejected.

    Attributes:
        problem: description without the place: "the value 50 of input 'tokens' is out of range for
            aten.embedding.default".
        expected: expected value for the error; "" if it is not known from the operator.
        got: actual value for the error; "" if there is none to show.
        node: name of the operator in the step graph.
        row: row of the batch that has the value; None if it cannot be determined.
    """

    problem: str
    expected: str
    got: str
    node: str
    row: int | None


@dataclass(frozen=True, slots=True)
class _IndexUse:
    """Indices that an operator uses.

    Attributes:
        index: node that computes them.
        size: size of the indexed dim.
        from_end: True if negative indices count from the end, so that -size is the smallest valid
            index; otherwise that is 0.
        ignored: an additional valid value.
    """

    index: Node
    size: Any
    from_end: bool = False
    ignored: int | None = None


def find_rejected(
    step: StepGraph,
    batch: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
) -> Rejected | None:
    """Return the first value that an operator of a step graph rejects.

    Only values that are computed from the batch and constants alone are examined; None if no such
    value is rejected.

    Args:
        step: the whole step graph.
        batch: name -> (rows, ...) tensor on the CPU, with which the graph was called.
        constants: constants of the graph, by the names of its ports.
        state: buffers by name. Only those that the graph does not update are used, such as
            positions.
    """
    placeholders, _ = ends(step.module)
    ports = dict(zip(placeholders, step.inputs, strict=True))
    updated = {port.name for port in step.outputs if port.role is Role.BUFFER}
    constants_by_node: dict[Node, Tensor] = {}
    for node, port in ports.items():
        if port.role is Role.CONSTANT:
            constants_by_node[node] = constants[port.name]
        elif port.role is Role.BUFFER and port.name not in updated:
            constants_by_node[node] = state[port.name]
    sizes = {
        symbol: batch[name].shape[at]
        for symbol, (name, at) in symbols_of(step).items()
        if name in batch
    }
    values = _Values(ports, batch, constants_by_node)
    for node in step.module.graph.nodes:
        rejected = (
            _find_failed_assertion(node, values)
            if node.target is aten._assert_async.msg
            else _find_bad_index(node, values, sizes)
        )
        if rejected is not None:
            return rejected
    return None


def _find_bad_index(node: Node, values: _Values, sizes: Mapping[str, int]) -> Rejected | None:
    for use in _index_uses(node):
        index, size = values.of(use.index), number(use.size, sizes)
        if not isinstance(index, Tensor) or index.dtype is torch.bool:
            continue
        low = -size if use.from_end else 0
        outside = (index < low) | (index >= size)
        if use.ignored is not None:
            outside &= index != use.ignored
        if not outside.any():
            continue
        value = int(index[outside][0])
        inputs = values.inputs_of(use.index)
        input_names = ", ".join(map(repr, inputs))
        plain = len(inputs) == 1 and bool((values.batch[inputs[0]] == value).any())
        what = (
            f"the value {value} of input {input_names}"
            if plain
            else f"the index {value}, computed from {input_names},"
        )
        row = _find_row(values, use.index, inputs, lambda computed: bool((computed == value).any()))  # noqa: B023  # called before the next turn
        return Rejected(
            f"{what} is out of range for {node.target}",
            f"{low} to {size - 1}",
            str(value),
            node.name,
            row,
        )
    return None


def _find_failed_assertion(node: Node, values: _Values) -> Rejected | None:
    condition, message = node.args
    assert isinstance(condition, Node), "what is asserted is computed"
    if (holds := values.of(condition)) is None or bool(holds):
        return None
    inputs = values.inputs_of(condition)
    row = _find_row(values, condition, inputs, lambda computed: not bool(computed))
    shown = {
        name: values.batch[name] if row is None else values.batch[name][row] for name in inputs
    }
    got = ", ".join(
        f"{name} {value.tolist()}" for name, value in shown.items() if value.numel() <= _MAX_SHOWN
    )
    return Rejected(str(message).rstrip("."), "", got, node.name, row)


def _find_row(
    values: _Values, node: Node, inputs: Sequence[str], is_bad: Callable[[Any], bool]
) -> int | None:
    """Return the first row from which alone a bad value of a node is computed; None if there is
    none.
    """
    counts = {values.batch[name].shape[0] for name in inputs if values.batch[name].ndim}
    if len(counts) != 1:
        return None
    for row in range(counts.pop()):
        value = values.of_row(row, inputs).of(node)
        if value is None:  # the graph contains a size of the whole batch
            return None
        if is_bad(value):
            return row
    return None


class _Values:
    """Values of nodes that are computed from a batch and constants alone."""

    def __init__(
        self,
        ports: Mapping[Node, Port],
        batch: Mapping[str, Tensor],
        constants: Mapping[Node, Tensor],
    ) -> None:
        self._ports, self.batch, self._constants = ports, batch, constants
        self._computed: dict[Node, Any] = {}

    def of_row(self, row: int, inputs: Collection[str]) -> _Values:
        """Return the values for one row of these inputs."""
        batch = {
            name: tensor[row : row + 1] if name in inputs else tensor
            for name, tensor in self.batch.items()
        }
        return _Values(self._ports, batch, self._constants)

    def of(self, target: Node) -> Any:
        """Return a node's value; None if it depends on anything else, or cannot be computed."""
        stack = [target]
        while stack:
            node = stack[-1]
            missing = [source for source in node.all_input_nodes if source not in self._computed]
            if node in self._computed:
                stack.pop()
            elif missing and node.op == "call_function":
                stack += missing
            else:
                self._computed[node] = self._compute(node)
        return self._computed[target]

    def inputs_of(self, target: Node) -> tuple[str, ...]:
        """Return the names of the batch inputs from which a node's value is computed."""
        ports = [
            self._ports[node]
            for node in computed_from([target], values=True)
            if node.op == "placeholder"
        ]
        return tuple(sorted(port.name for port in ports if port.role is Role.BATCH))

    def _compute(self, node: Node) -> Any:
        if node.op == "placeholder":
            port = self._ports[node]
            return (
                self.batch.get(port.name) if port.role is Role.BATCH else self._constants.get(node)
            )
        sources = {source: self._computed[source] for source in node.all_input_nodes}
        if node.op != "call_function" or any(value is None for value in sources.values()):
            return None
        call_args = torch.fx.node.map_arg((node.args, node.kwargs), sources.__getitem__)
        call_args = torch.fx.node.map_aggregate(
            call_args, lambda each: torch.device("cpu") if isinstance(each, torch.device) else each
        )
        try:
            return node.target(*call_args[0], **call_args[1])  # type: ignore[operator]
        except (RuntimeError, IndexError):
            # an earlier index is out of range, or the graph contains a size of the whole batch
            return None


def _index_uses(node: Node) -> Iterator[_IndexUse]:
    """Yield the indices that an operator uses, with their valid ranges."""
    if (
        node.op == "call_function"
        and is_overload(node.target)
        and node.target.overloadpacket in _INDEXING
    ):
        yield from _INDEXING[node.target.overloadpacket](arguments(node))


def _shape_of(node: Node) -> Sequence[Any]:
    shape: Sequence[Any] = node.meta["val"].shape
    return shape


def _embedding_uses(args: dict[str, Any]) -> Iterator[_IndexUse]:
    yield _IndexUse(args["indices"], _shape_of(args["weight"])[0])


def _class_uses(args: dict[str, Any]) -> Iterator[_IndexUse]:
    shape = _shape_of(args["self"])
    yield _IndexUse(args["target"], shape[1 if len(shape) > 1 else 0], ignored=args["ignore_index"])


def _dim_uses(args: dict[str, Any], *, from_end: bool = False) -> Iterator[_IndexUse]:
    shape = _shape_of(args["self"])
    yield _IndexUse(args["index"], shape[args["dim"]] if shape else 1, from_end)


def _per_dim_uses(args: dict[str, Any]) -> Iterator[_IndexUse]:
    shape, dim = _shape_of(args["self"]), 0
    for index in args["indices"]:
        mask = index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)
        if index is not None and not mask:
            yield _IndexUse(index, shape[dim], from_end=True)
        dim += len(_shape_of(index)) if mask else 1


def _element_uses(args: dict[str, Any]) -> Iterator[_IndexUse]:
    yield _IndexUse(args["index"], math.prod(_shape_of(args["self"])), from_end=True)


_INDEXING: dict[Any, Callable[[dict[str, Any]], Iterator[_IndexUse]]] = {
    aten.embedding: _embedding_uses,
    aten._embedding_bag: _embedding_uses,
    aten._embedding_bag_forward_only: _embedding_uses,
    aten.nll_loss_forward: _class_uses,
    aten.nll_loss2d_forward: _class_uses,
    **dict.fromkeys(
        (
            aten.gather,
            aten.scatter,
            aten.scatter_add,
            aten.scatter_reduce,
            aten.index_select,
            aten.index_add,
            aten.index_copy,
        ),
        _dim_uses,
    ),
    aten.index_fill: partial(_dim_uses, from_end=True),
    aten.index: _per_dim_uses,
    aten.index_put: _per_dim_uses,
    aten.take: _element_uses,
}
