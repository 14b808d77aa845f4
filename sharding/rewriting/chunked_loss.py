"""Compute a loss and its gradients for some rows of the logits at a time, so that the logits of a
whole batch never exist.

The part of backward that needs the logits follows each chunk's part of forward at once: nothing is
computed twice. What is summed over rows, such as the loss and the gradient of the output layer, is
summed over chunks, in float32 at least.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from trainload.autograd_trace.graph_calls import append, converted, remove_dead_code, wide
from trainload.autograd_trace.graphs import CHUNK, TANGENT, StepGraph
from trainload.core.errors import PlanError
from trainload.sharding.analysis.graph_nodes import LazyGraphModule, arguments, ends, mode_of
from trainload.sharding.rewriting.row_layouts import Form, Layout, NotByRowError, RowCall, Space
from trainload.sharding.rewriting.row_region import (
    RowRegion,
    find_region,
    first_use,
    hoisted,
    last_products,
)
from trainload.sharding.rewriting.row_rules import MEAN_REDUCTION, NO_REDUCTION

aten = torch.ops.aten

_PRODUCT = "product"
"""Key in `node.meta` of products whose results may be computed in chunks."""
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


@dataclass(frozen=True, slots=True)
class Chunked:
    """A step graph in which some losses are computed in chunks.

    Attributes:
        step: the graph.
        products: number of products for whose results that was possible.
        reasons: why others remain whole.
    """

    step: StepGraph
    products: int
    reasons: tuple[str, ...]


def chunk_losses(step: StepGraph, chunks: int) -> Chunked:
    """Return a step graph whose logits are computed in chunks of rows where that is possible.

    Values change only by the order and, in smaller dtypes, the precision of sums over rows.

    Args:
        step: step graph of one rank of the tensor axis.
        chunks: number of chunks, of as equal numbers of rows as possible.
    """
    done = 0
    reasons: list[str] = []
    simpler = _simplified(step)
    for last in last_products(simpler):
        last.meta[_PRODUCT] = last.name
    while product := _next_product(simpler):
        try:
            simpler = _Chunks(simpler, find_region(simpler.module, product), chunks).run()
        except NotByRowError as error:
            del product.meta[_PRODUCT]
            reasons.append(str(error))
        else:
            done += 1
    if not done and not reasons:
        reasons.append("no loss is computed from a product of rows and a matrix")
    return Chunked(simpler if done else step, done, tuple(reasons))


def _next_product(step: StepGraph) -> Node | None:
    """Return the next product whose result may be computed in chunks, and is not yet."""
    nodes: Iterable[Node] = step.module.graph.nodes
    return next((n for n in nodes if _PRODUCT in n.meta and CHUNK not in n.meta), None)


def check_chunked(step: StepGraph, chunks: int, where: str) -> None:
    """Raise PlanError if no logits of a training graph can be computed in chunks.

    Args:
        step: the graph.
        chunks: number of chunks.
        where: name of the graph.
    """
    chunked = chunk_losses(step, chunks)
    if not chunked.products:
        raise PlanError(
            "the loss cannot be computed in chunks of rows",
            where=where,
            expected="a product of rows and a matrix, and then operators that work by row",
            got="; ".join(chunked.reasons),
            hint="Leave loss_chunks at 1.",
        )


def _simplified(step: StepGraph) -> StepGraph:
    """Return the same graph in which less needs the logits of all rows.

    Each mean of `nll_loss_forward` becomes a sum, divided by the weight of all targets, and each
    size is read from the first tensor that has it.
    """
    old = step.module.graph
    graph, copied = Graph(), dict[Node, Node]()
    mode = mode_of(ends(step.module)[0])
    totals: dict[Node, Node] = {}
    first: dict[str, tuple[Node, int]] = {}

    def emit(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return append(graph, mode, target, *args, **kwargs)

    for node in old.nodes:
        source: Any = node.args[0] if node.target is operator.getitem else None
        if node.target in _LOSSES and arguments(node)["reduction"] != NO_REDUCTION:
            totals[node] = _total_weight(node, copied, emit)
            args = arguments(node) | {"reduction": NO_REDUCTION}
            copied[node] = emit(
                node.target,
                *(copied[a] if isinstance(a, Node) else a for a in args.values()),
            )
        elif source in totals:
            total = totals[source]
            if node.args[1] == 0:
                each = emit(operator.getitem, copied[source], 0)
                total = emit(aten.sum.default, each, dtype=wide(node.meta["val"].dtype))
                if arguments(source)["reduction"] == MEAN_REDUCTION:
                    total = emit(aten.div.Tensor, total, totals[source])
            copied[node] = emit(aten._to_copy.default, total, dtype=node.meta["val"].dtype)
        elif node.target is aten.sym_size.int and isinstance(node.meta["val"], SymInt):
            tensor, dim = first[str(node.meta["val"].node.expr)]
            copied[node] = emit(aten.sym_size.int, tensor, dim)
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            for dim, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
                if isinstance(size, SymInt):
                    first.setdefault(str(size.node.expr), (copied[node], dim))
            continue
        copied[node].meta = {**node.meta, **copied[node].meta}
    return StepGraph(LazyGraphModule(step.module, graph), step.inputs, step.outputs)


def _total_weight(loss: Node, copied: dict[Node, Node], emit: Callable[..., Node]) -> Node:
    """Append the sum of the weights of a loss's targets."""
    args = arguments(loss)
    target, dtype = copied[args["target"]], wide(loss.meta["val"][1].dtype)
    counted = emit(aten.ne.Scalar, target, args["ignore_index"])
    if args["weight"] is None:
        weights = emit(aten._to_copy.default, counted, dtype=dtype)
    else:
        ignored = emit(aten.logical_not.default, counted)
        target = converted(emit, target, torch.int64)
        safe = emit(aten.masked_fill.Scalar, target, ignored, 0)
        each = emit(
            aten.embedding.default, emit(aten.unsqueeze.default, copied[args["weight"]], 1), safe
        )
        each = emit(aten.squeeze.dim, each, -1)
        weights = emit(aten.masked_fill.Scalar, each, ignored, 0)
    return emit(aten.sum.default, weights)


class _Chunks:
    """Rewrites a graph with one region in chunks."""

    def __init__(self, step: StepGraph, region: RowRegion, chunks: int) -> None:
        self._step, self._region, self._chunks = step, region, chunks
        self._graph = Graph()
        self._mode = mode_of(ends(step.module)[0])
        self._copied: dict[Node, Node] = {}
        self._sizes: dict[str, Node] = {}
        self._flat: dict[tuple[Node, Layout], Node] = {}
        self._meta: dict[str, Any] = {}

    def run(self) -> StepGraph:
        calls, begin = self._region.calls, first_use(self._region)
        for node in self._step.module.graph.nodes:
            if node is begin:
                self._hoist()
                self._compute()
            if node not in calls and (node not in self._copied or node.name == TANGENT):
                self._copy(node)
        remove_dead_code(self._graph)
        self._graph.lint()
        return StepGraph(
            LazyGraphModule(self._step.module, self._graph), self._step.inputs, self._step.outputs
        )

    def _copy(self, node: Node) -> None:
        self._copied[node] = self._graph.node_copy(node, self._copied.__getitem__)
        value = node.meta.get("val")
        if isinstance(value, SymInt):
            self._sizes.setdefault(str(value.node.expr), self._copied[node])

    def _hoist(self) -> None:
        """Copy what the region needs and the graph computes later, such as the loss's gradient."""
        for node in hoisted(self._region, set(self._copied)):
            if node.name == TANGENT:
                self._copied[node] = self._graph.create_node(
                    node.op, node.target, node.args, node.kwargs, name=f"{TANGENT}_of_chunks"
                )
                self._copied[node].meta = dict(node.meta)
            else:
                self._copy(node)

    # Chunks

    def _compute(self) -> None:
        calls = self._region.calls
        used = {n for n in calls if any(user not in calls for user in n.users)}
        count = self._count()
        bounds = [self._bound(count, at) for at in range(self._chunks + 1)]
        results: dict[Node, list[Node]] = {}
        totals: dict[Node, Node] = {}
        for index in range(self._chunks):
            part = _Part(self, index, bounds[index], bounds[index + 1])
            for node, call in calls.items():
                if node in used and call.layout.form is Form.SUM:
                    totals[node] = part.add(node, call, totals.get(node))
                else:
                    part.values[node] = part.call(node, call)
            for node in used:
                if node in part.values:
                    results.setdefault(node, []).append(part.values[node])
        for node in (n for n in calls if n in used):
            self._meta = {**node.meta, CHUNK: self._chunks}
            self._copied[node] = (
                self._total(node, totals[node], count)
                if node in totals
                else self._joined(node, results[node])
            )

    def _count(self) -> Node | int:
        rules = self._region.rules
        if not isinstance(rules.count, SymInt):
            return int(rules.count)
        if rules.selection is None:
            return self._size(rules.count)
        first, *others = self._shape(rules.selected_rows)
        for size in others:
            first = self.emit(operator.mul, first, size)
        count: Node = first
        return count

    def _bound(self, count: Node | int, index: int) -> Node | int:
        """Return the first row of a chunk."""
        if isinstance(count, int):
            return count * index // self._chunks
        if index in (0, self._chunks):
            return count if index else 0
        return self.emit(operator.floordiv, self.emit(operator.mul, count, index), self._chunks)

    def flat(self, node: Node, layout: Layout) -> Node:
        """Return an operand with all rows in one dim."""
        key = node, layout
        if key not in self._flat:
            self._flat[key] = self._flatten(self._copied[node], layout)
        return self._flat[key]

    def _flatten(self, value: Node, layout: Layout) -> Node:
        ndim = value.meta["val"].ndim
        if layout.form is Form.TRANSPOSED:
            if layout.space is self._region.rules.computed:
                return value
            rows = self._flatten(self.emit(aten.t.default, value), replace(layout, form=Form.ROWS))
            return self.emit(aten.t.default, rows)
        lead = layout.lead
        if layout.form is Form.CHANNELS:
            value, lead = self.emit(aten.permute.default, value, [0, *range(2, ndim), 1]), ndim - 1
        if layout.space is not self._region.rules.computed:
            value, lead = self._select(value, lead)
        rest = self._shape(value.meta["val"].shape[lead:])
        return value if lead == 1 else self.emit(aten.reshape.default, value, [-1, *rest])

    def _select(self, value: Node, lead: int) -> tuple[Node, int]:
        """Return the selected rows of a value with all rows, and the number of their dims."""
        rules, args = self._region.rules, self._slice_arguments()
        rest = self._shape(value.meta["val"].shape[lead:])
        value = self.emit(aten.reshape.default, value, [*self._shape(rules.all_rows), *rest])
        return self.emit(aten.slice.Tensor, value, *args), len(rules.all_rows)

    def _pad(self, value: Node) -> Node:
        """Return the rows of a node's value, of which those that are not selected are 0."""
        rules, args = self._region.rules, self._slice_arguments()
        rest = self._shape(value.meta["val"].shape[1:])
        value = self.emit(aten.view.default, value, [*self._shape(rules.selected_rows), *rest])
        whole = [*self._shape(rules.all_rows), *rest]
        return self.emit(aten.slice_backward.default, value, whole, *args)

    def _slice_arguments(self) -> tuple[int, int, int, int]:
        """Return dim, start, end and step of the selection."""
        selection = self._region.rules.selection
        assert selection is not None, "only a selection has other rows"
        args = arguments(selection)
        end = sys.maxsize if args["end"] is None else args["end"]
        return args["dim"], args["start"] or 0, end, args["step"]

    def _shape(self, sizes: Sequence[Any]) -> list[Any]:
        return [self._size(size) if isinstance(size, SymInt) else size for size in sizes]

    def whole(self, node: Node) -> Node:
        """Return an operand that every chunk needs."""
        return self._copied[node]

    def _total(self, node: Node, total: Node, count: Node | int) -> Node:
        averaged = self._region.calls[node].averaged
        if averaged:
            added = self.emit(operator.mul, count, averaged)
            number = self.emit(
                aten.scalar_tensor.default,
                added,
                dtype=total.meta["val"].dtype,
                device=total.meta["val"].device,
            )
            total = self.emit(aten.div.Tensor, total, number)
        return converted(self.emit, total, node.meta["val"].dtype)

    def _joined(self, node: Node, parts: list[Node]) -> Node:
        layout, shape = self._region.calls[node].layout, list(node.meta["val"].shape)
        whole = self.emit(aten.cat.default, parts)
        if layout.space is Space.PADDED:
            whole = self._pad(whole)
        elif layout.lead == 1:
            return whole
        return self.emit(aten.view.default, whole, self._shape(shape))

    def _size(self, size: SymInt) -> Node:
        """Return a node with this size."""
        expression = str(size.node.expr)
        if expression not in self._sizes:
            places = (
                (node, dim)
                for node in self._copied
                if isinstance(node.meta.get("val"), Tensor)
                for dim, own in enumerate(node.meta["val"].shape)
                if isinstance(own, SymInt) and str(own.node.expr) == expression
            )
            at, dim = next(places, (None, 0))
            if at is None:
                raise NotByRowError(self._region.seed, f"has rows of a size {expression}")
            self._sizes[expression] = self.emit(aten.sym_size.int, self._copied[at], dim)
        return self._sizes[expression]

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Append a call."""
        node = append(self._graph, self._mode, target, *args, **kwargs)
        node.meta = {**self._meta, **node.meta}
        return node


class _Part:
    """Emits the calls of one chunk."""

    def __init__(self, chunks: _Chunks, index: int, start: Node | int, stop: Node | int) -> None:
        self._chunks, self._index, self._start, self._stop = chunks, index, start, stop
        self._meta: dict[str, Any] = {}
        self._slices: dict[tuple[Node, Layout], Node] = {}
        self.values: dict[Node, Node] = {}

    @property
    def rows(self) -> Node | int:
        if isinstance(self._start, int) and isinstance(self._stop, int):
            return self._stop - self._start
        return self(operator.sub, self._stop, self._start)

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self._chunks.emit(target, *args, **kwargs)
        node.meta = {**self._meta, **node.meta, CHUNK: self._index}
        return node

    def call(self, node: Node, call: RowCall) -> Node:
        """Append a call for the chunk's rows."""
        self._meta = node.meta
        return call.make(self, lambda operand: self._operand(operand, call.operands[operand]))

    def add(self, node: Node, call: RowCall, total: Node | None) -> Node:
        """Append a call that sums over the chunk's rows, and add the sum to that of the chunks
        before.
        """
        dtype = node.meta["val"].dtype
        is_exact = node.target is aten.mm.default and dtype in (torch.float32, torch.float64)
        if total is not None and is_exact:
            self._meta = node.meta
            operands = [self._operand(n, layout) for n, layout in call.operands.items()]
            return self(aten.addmm.default, total, *operands)
        value = converted(self, self.call(node, call), wide(dtype))
        return value if total is None else self(aten.add.Tensor, total, value)

    def _operand(self, operand: Node, layout: Layout | None) -> Node:
        if operand in self.values:
            return self.values[operand]
        if layout is None:
            return self._chunks.whole(operand)
        key = operand, layout
        if key not in self._slices:
            dim = 1 if layout.form is Form.TRANSPOSED else 0
            flat = self._chunks.flat(operand, layout)
            self._slices[key] = self(aten.slice.Tensor, flat, dim, self._start, self._stop)
        return self._slices[key]
