"""Call operators with some of the rows of their operands: a rule for each kind of operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from trainload.autograd_trace.graph_calls import wide
from trainload.capture.operators import is_overload, is_seeded
from trainload.sharding.analysis.graph_nodes import arguments
from trainload.sharding.rewriting.row_layouts import (
    Emit,
    Form,
    Layout,
    NotByRowError,
    RowCall,
    Space,
    ValueOf,
    is_same_size,
    leading,
    product_of,
    row_dims,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


_COPIES = {aten._to_copy, aten.clone, aten.detach, aten.alias}
_LINEAR = {*_COPIES, aten.neg, aten.mul, aten.div}
"""Elementwise operators that map 0 to 0, if one operand has rows."""
_ELEMENTWISE = {*_COPIES, aten.where, aten.full_like, aten.zeros_like, aten.ones_like}
_RESHAPING = {aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze}
_TRANSPOSING = {aten.t, aten.transpose, aten.permute}
_SLICING = {aten.slice, aten.slice_backward}
_ALONG_DIMS = {
    *(aten._softmax, aten._log_softmax),
    *(aten._softmax_backward_data, aten._log_softmax_backward_data),
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin),
    *(aten.any, aten.all, aten.logsumexp, aten.var, aten.cumsum, aten.topk, aten.sort),
    *(aten.gather, aten.scatter, aten.scatter_add, aten.slice, aten.select),
}
"""Operators on aligned tensors along the dims in their argument `dim`."""
_FILLED: dict[Any, Callable[[Mapping[str, Any]], Any]] = {
    aten.full: lambda args: args["fill_value"],
    aten.new_full: lambda args: args["fill_value"],
    aten.zeros: lambda _: 0,
    aten.new_zeros: lambda _: 0,
    aten.ones: lambda _: 1,
    aten.new_ones: lambda _: 1,
}
"""Operators that fill a tensor -> its value, given their arguments."""
_LOSSES = {
    aten.nll_loss_forward: aten.nll_loss_forward.default,
    aten.nll_loss2d_forward: aten.nll_loss_forward.default,
    aten.nll_loss_backward: aten.nll_loss_backward.default,
    aten.nll_loss2d_backward: aten.nll_loss_backward.default,
}
"""Negative log likelihood -> the same for (rows, classes)."""
NO_REDUCTION, MEAN_REDUCTION = range(2)
"""Values of torch.nn.functional._Reduction."""


class RowRules:
    """The rules for a number of rows.

    Args:
        count: number of rows.
        selection: the `slice` that selects rows; None if there is none.

    Attributes:
        all_rows, selected_rows: sizes of the dims that count rows, before and after the selection.
    """

    all_rows: Sequence[Any] = ()
    selected_rows: Sequence[Any] = ()

    def __init__(self, count: int | SymInt, selection: Node | None = None) -> None:
        self.selection = selection
        self._counts: dict[Space, Any] = {Space.ALL: count, Space.PADDED: count}
        if selection is not None:
            (source,) = _tensors(selection)
            lead = leading(source.meta["val"].shape, count)
            assert lead is not None, "a selection has all rows"
            self.all_rows = source.meta["val"].shape[:lead]
            self.selected_rows = selection.meta["val"].shape[:lead]
            self._counts[Space.SELECTED] = product_of(self.selected_rows)

    @property
    def computed(self) -> Space:
        """Space of the rows that are computed."""
        return Space.ALL if self.selection is None else Space.SELECTED

    @property
    def count(self) -> Any:
        """Number of rows that are computed."""
        return self._counts[self.computed]

    def lead(self, shape: Sequence[Any], space: Space) -> int | None:
        """Return how many leading dims count the rows, or None if they do not."""
        return leading(shape, self._counts[space])

    def width(self, value: object, layout: Layout) -> int:
        """Return the number of elements of a row of a tensor, or of the widest of several."""
        tensors = value if isinstance(value, tuple | list) else [value]
        widths = []
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                rows = row_dims(layout, tensor.ndim)
                rest: list[Any] = [s for dim, s in enumerate(tensor.shape) if dim not in rows]
                widths.append(math.prod(s for s in rest if not isinstance(s, SymInt)))
        return max(widths, default=0)

    def call(
        self, node: Node, known: Mapping[Node, Layout], wanted: Layout | None = None
    ) -> RowCall:
        """Return how a node is called by row.

        Args:
            node: the node.
            known: layouts of nodes before it that are computed in parts.
            wanted: layout of its result, if no operand is known.

        Raises:
            NotByRowError: it needs several rows at once.
        """
        if node.target is operator.getitem:
            return self._item(node, known, wanted)
        if not is_overload(node.target) or is_seeded(node.target):
            raise NotByRowError(node, "has no rule for rows")
        packet: Any = node.target.overloadpacket
        if packet in (aten.mm, aten.addmm):
            return self._product(node, known, wanted)
        if packet in _FILLED:
            return self._filled(node, wanted)
        if packet in _LOSSES:
            return self._negative_log_likelihood(node, known)
        layout = self._layout(node, known, wanted)
        if packet in _RESHAPING:
            return self._reshaped(node, layout, is_operand=wanted is None)
        if packet in _TRANSPOSING:
            return self._transposed(node, layout, is_operand=wanted is None)
        if packet is aten.expand:
            return self._expanded(node, layout, is_operand=wanted is None)
        if packet in _SLICING:
            if _keeps_shape(node):
                return self._same(node, layout)
            if self._is_selection(node):
                return self._selected(node, layout, is_operand=wanted is None)
        if packet in (aten.sum, aten.mean) and _sums_rows(node, layout):
            return self._summed(node, layout)
        if layout.space is Space.PADDED and not _maps_zero_to_zero(node, known):
            raise NotByRowError(node, "computes with rows that are not selected")
        if packet in _ALONG_DIMS:
            return self._along_dims(node, layout, known)
        if (
            torch.Tag.pointwise in node.target.tags
            or packet in _ELEMENTWISE
            or packet in (c10d.all_reduce, c10d.wait_tensor)
        ):
            return self._elementwise(node, layout, known)
        raise NotByRowError(node, "has no rule for rows")

    # Rules

    def _item(self, node: Node, known: Mapping[Node, Layout], wanted: Layout | None) -> RowCall:
        source: Any = node.args[0]
        layout = known.get(source, wanted)
        assert layout is not None, "a node is added because of an operand or of its reader"
        return RowCall(
            layout,
            {source: layout},
            lambda emit, part: emit(operator.getitem, part(source), node.args[1]),
        )

    def _elementwise(self, node: Node, layout: Layout, known: Mapping[Node, Layout]) -> RowCall:
        if not isinstance(node.meta["val"], Tensor):
            raise NotByRowError(node, "has several results")
        shape = node.meta["val"].shape
        rows = row_dims(layout, len(shape))
        if not is_same_size(product_of(shape[d] for d in rows), self._counts[layout.space]):
            raise NotByRowError(node, "changes the number of rows")
        operands: dict[Node, Layout | None] = {}
        is_transposed = layout.form is Form.TRANSPOSED
        for each in _tensors(node):
            own = each.meta["val"].shape
            sizes = [(own[d - len(shape)], shape[d]) for d in rows if d >= len(shape) - len(own)]
            if each in known and (len(own) != len(shape) or known[each] != layout):
                raise NotByRowError(node, "aligns rows with other dims")
            if len(own) == len(shape) and all(is_same_size(*pair) for pair in sizes):
                operands[each] = layout
            elif all(is_same_size(size, 1) for size, _ in sizes):
                operands[each] = None
            else:
                raise NotByRowError(node, f"broadcasts {each.name} along some of the rows' dims")

        def make(emit: Emit, part: ValueOf) -> Node:
            def value(each: Node) -> Node:
                if each not in operands or operands[each] is not None or is_transposed:
                    return part(each)  # the last dim of a transposed part counts its rows
                own = each.meta["val"].shape
                first = len(shape) - len(own)
                rest = [s for d, s in enumerate(own, first) if d not in rows]
                return (
                    part(each)
                    if len(rest) == len(own)
                    else emit(aten.reshape.default, part(each), rest)
                )

            return emit(_target(node), *map_arg(node.args, value), **map_arg(node.kwargs, value))

        return RowCall(layout, operands | _sizes(node), make)

    def _along_dims(self, node: Node, layout: Layout, known: Mapping[Node, Layout]) -> RowCall:
        args, first = arguments(node), _tensors(node)[0].meta["val"]
        rows = row_dims(layout, first.ndim)
        dims = args.get("dim")
        listed = [d % first.ndim for d in _as_list(dims)]
        if not listed or any(d in rows for d in listed) or layout.form is Form.TRANSPOSED:
            raise NotByRowError(node, "works along the rows")
        for each in _tensors(node):
            shape = each.meta["val"].shape
            if known.get(each, layout) != layout:
                raise NotByRowError(node, "aligns rows with other dims")
            if len(shape) != first.ndim or not all(
                is_same_size(shape[d], first.shape[d]) for d in rows
            ):
                raise NotByRowError(node, f"reads {each.name}, which has other rows")
        if not is_same_size(product_of(first.shape[d] for d in rows), self._counts[layout.space]):
            raise NotByRowError(node, "changes the number of rows")
        own = [1 if layout.form is Form.CHANNELS else d - layout.lead + 1 for d in listed]
        args["dim"] = own if isinstance(dims, tuple | list) else own[0]
        value = node.meta["val"]
        result = layout
        if (
            layout.form is Form.CHANNELS
            and (value[0] if isinstance(value, tuple) else value).ndim < first.ndim
        ):
            result = Layout(Form.ROWS, first.ndim - 1, layout.space)
        operands: dict[Node, Layout | None] = dict.fromkeys(_tensors(node), layout)
        return RowCall(result, operands | _sizes(node), _by_name(node, args))

    def _summed(self, node: Node, layout: Layout) -> RowCall:
        """Sum over all rows, and perhaps over dims of each row."""
        (source,) = _tensors(node)
        value, shape = source.meta["val"], list(node.meta["val"].shape)
        rows = row_dims(layout, value.ndim)
        others = [d for d in _summed_dims(node) if d not in rows]
        own = [0, *(1 if layout.form is Form.CHANNELS else d - layout.lead + 1 for d in others)]
        is_mean = node.target.overloadpacket is aten.mean  # type: ignore[union-attr]
        dtype = node.meta["val"].dtype
        if any(isinstance(size, SymInt) for size in (*shape, *(value.shape[d] for d in others))):
            raise NotByRowError(node, "sums over, or has, a size that depends on the batch")
        if layout.space is not self.computed and (is_mean or layout.space is Space.ALL):
            raise NotByRowError(node, "sums over rows that are not selected")

        def make(emit: Emit, part: ValueOf) -> Node:
            total = emit(aten.sum.dim_IntList, part(source), own, dtype=wide(dtype))
            return emit(aten.reshape.default, total, shape)

        added = math.prod(int(value.shape[d]) for d in others)
        return RowCall(Layout(Form.SUM), {source: layout}, make, averaged=added if is_mean else 0)

    def _product(self, node: Node, known: Mapping[Node, Layout], wanted: Layout | None) -> RowCall:
        """Mm or addmm: of rows and a matrix, or of two tensors of rows, which sums over rows."""
        *bias, left, right = _tensors(node)
        layouts = [known[each] for each in (left, right) if each in known]
        space = layouts[0].space if layouts else wanted.space if wanted else self.computed
        rows, transposed = Layout(Form.ROWS, 1, space), Layout(Form.TRANSPOSED, 1, space)
        if right not in known and known.get(left, rows) == rows:
            if any(b in known or b.meta["val"].ndim > 1 for b in bias) or (
                bias and space is Space.PADDED
            ):
                raise NotByRowError(node, "adds a tensor of several rows")
            if is_same_size(left.meta["val"].shape[0], self._counts[space]):
                return self._mapped(node, rows, {left: rows, right: None, **dict.fromkeys(bias)})
        if (
            not bias
            and is_same_size(left.meta["val"].shape[1], self._counts[space])
            and known.get(left, transposed) == transposed
            and known.get(right, rows) == rows
        ):
            if self.selection is not None and space is Space.ALL:
                raise NotByRowError(node, "sums over rows that are not selected")
            return self._mapped(node, Layout(Form.SUM), {left: transposed, right: rows})
        raise NotByRowError(node, "multiplies along the rows")

    def _transposed(self, node: Node, layout: Layout, *, is_operand: bool) -> RowCall:
        """t, transpose or permute: the layout is the operand's or the result's."""
        (source,) = _tensors(node)
        order = _order_of_dims(node)
        last = len(order) - 1
        to_channels, to_rows = [0, last, *range(1, last)], [0, *range(2, last + 1), 1]
        form, space = layout.form, layout.space
        if last == 1 and form in (Form.ROWS, Form.TRANSPOSED) and layout.lead == 1:
            other = Layout(Form.TRANSPOSED if form is Form.ROWS else Form.ROWS, 1, space)
            call = aten.t.default
        elif (
            last > 1 and form is Form.CHANNELS and order == (to_rows if is_operand else to_channels)
        ):
            other, call = Layout(Form.ROWS, last, space), None
        elif (
            last > 1
            and form is Form.ROWS
            and layout.lead == last
            and order == (to_channels if is_operand else to_rows)
        ):
            other, call = Layout(Form.CHANNELS, 1, space), None
        else:
            raise NotByRowError(node, "moves rows among other dims")
        before, after = (layout, other) if is_operand else (other, layout)
        return RowCall(
            after,
            {source: before},
            lambda emit, part: part(source) if call is None else emit(call, part(source)),
        )

    def _reshaped(self, node: Node, layout: Layout, *, is_operand: bool) -> RowCall:
        (source,) = _tensors(node)
        before, after = source.meta["val"].shape, node.meta["val"].shape
        other = after if is_operand else before
        if layout.form is Form.CHANNELS:
            rest = [s for d, s in enumerate(other) if d != 1]
            if (
                len(other) < 2
                or not is_same_size(before[1], after[1])
                or not is_same_size(before[0], after[0])
                or not is_same_size(product_of(rest), self._counts[layout.space])
            ):
                raise NotByRowError(node, "mixes rows with other dims")
            return self._same(node, layout)
        lead = self.lead(other, layout.space)
        if layout.form is not Form.ROWS or lead is None:
            raise NotByRowError(node, "mixes rows with other dims")
        changed = Layout(Form.ROWS, lead, layout.space)
        first, second = (layout, changed) if is_operand else (changed, layout)
        rest = list(after[second.lead :])
        if any(isinstance(size, SymInt) for size in rest):
            raise NotByRowError(node, "has a size that depends on the batch within a row")
        is_same = rest == list(before[first.lead :])
        return RowCall(
            second,
            {source: first},
            lambda emit, part: (
                part(source) if is_same else emit(aten.reshape.default, part(source), [-1, *rest])
            ),
        )

    def _same(self, node: Node, layout: Layout) -> RowCall:
        source = _tensors(node)[0]
        return RowCall(layout, {source: layout}, lambda _, part: part(source))

    def _is_selection(self, node: Node) -> bool:
        """Return True if a slice, or the backward of one, is that of the selection."""
        if self.selection is None:
            return False
        names = ("dim", "start", "end", "step")
        own, other = arguments(node), arguments(self.selection)
        is_slice = node.target is aten.slice.Tensor
        before, after = _tensors(node)[0].meta["val"].shape, node.meta["val"].shape
        whole = self.all_rows[: other["dim"] + 1]
        return [own[n] for n in names] == [other[n] for n in names] and all(
            map(is_same_size, before if is_slice else after, whole)
        )

    def _selected(self, node: Node, layout: Layout, *, is_operand: bool) -> RowCall:
        source = _tensors(node)[0]
        before, after = (
            (Space.ALL, Space.SELECTED)
            if node.target is aten.slice.Tensor
            else (Space.SELECTED, Space.PADDED)
        )
        if layout.form is not Form.ROWS or layout.space is not (before if is_operand else after):
            raise NotByRowError(node, "selects rows among those that are selected")
        return RowCall(
            replace(layout, space=after),
            {source: replace(layout, space=before)},
            lambda _, part: part(source),
        )

    def _expanded(self, node: Node, layout: Layout, *, is_operand: bool) -> RowCall:
        """Repeat a value within each row, or one value for all rows."""
        (source,) = _tensors(node)
        if layout.form is Form.TRANSPOSED:
            raise NotByRowError(node, "repeats rows")
        before, after = source.meta["val"].shape, node.meta["val"].shape
        rows = row_dims(layout, len(after))
        first = len(after) - len(before)
        rest = [s for d, s in enumerate(after) if d not in rows]
        if any(isinstance(size, SymInt) for size in rest):
            raise NotByRowError(node, "has a size that depends on the batch within a row")
        pairs = [(before[d - first], after[d]) for d in rows if d >= first]
        if first == 0 and all(is_same_size(*pair) for pair in pairs):
            return RowCall(
                layout,
                {source: layout},
                lambda emit, part: emit(aten.expand.default, part(source), [-1, *rest]),
            )
        if is_operand or not all(is_same_size(size, 1) for size, _ in pairs):
            raise NotByRowError(node, "repeats rows")
        own = [s for d, s in enumerate(before, first) if d not in rows]

        def make(emit: Emit, part: ValueOf) -> Node:
            value = part(source)
            if len(own) < len(before):
                value = emit(aten.reshape.default, value, own)
            return emit(aten.expand.default, value, [emit.rows, *rest])

        return RowCall(layout, {source: None}, make)

    def _filled(self, node: Node, wanted: Layout | None) -> RowCall:
        value = node.meta["val"]
        layout = wanted or Layout(
            Form.ROWS, self.lead(value.shape, self.computed) or 0, self.computed
        )
        rest = [s for d, s in enumerate(value.shape) if d not in row_dims(layout, value.ndim)]
        if not layout.lead or any(isinstance(size, SymInt) for size in rest):
            raise NotByRowError(node, "has a size that depends on the batch within a row")
        filled = _FILLED[node.target.overloadpacket](arguments(node))  # type: ignore[union-attr]
        operands = [filled] if isinstance(filled, Node) else []
        options = {"dtype": value.dtype, "device": value.device}
        return RowCall(
            layout,
            dict.fromkeys(operands),
            lambda emit, part: emit(
                aten.full.default, [emit.rows, *rest], map_arg(filled, part), **options
            ),
        )

    def _negative_log_likelihood(self, node: Node, known: Mapping[Node, Layout]) -> RowCall:
        args = arguments(node)
        packet: Any = node.target.overloadpacket  # type: ignore[union-attr]
        is_forward = packet in (aten.nll_loss_forward, aten.nll_loss2d_forward)
        each_row = args["reduction"] == NO_REDUCTION
        scores, target, space = args["self"], args["target"], self.computed
        ndim = scores.meta["val"].ndim
        layout = Layout(Form.ROWS if ndim == 2 else Form.CHANNELS, 1, space)
        rows = Layout(Form.ROWS, ndim - 1, space)
        if ndim == 1 or known.get(scores, layout) != layout:
            raise NotByRowError(node, "aligns rows with other dims")
        assert each_row or not is_forward, "sums over rows are apart"
        operands: dict[Node, Layout | None] = {scores: layout, target: rows}
        operands |= {args["weight"]: None} if args["weight"] is not None else {}
        if not is_forward:
            operands |= {args["total_weight"]: None}
            operands |= {args["grad_output"]: rows if each_row else None}
        result = rows if is_forward else layout
        values = list(args.values())
        return RowCall(
            result,
            operands | _sizes(node),
            lambda emit, part: emit(_LOSSES[packet], *map_arg(values, part)),
        )

    # Helpers

    def _layout(self, node: Node, known: Mapping[Node, Layout], wanted: Layout | None) -> Layout:
        """Return the layout of a node's operands with rows, or else of its result."""
        layouts = {known[each] for each in _tensors(node) if each in known}
        if any(each.form is Form.SUM for each in layouts):
            raise NotByRowError(node, "is needed for each row, and needs a sum over all rows")
        if len(layouts) > 1:
            raise NotByRowError(node, "combines rows of several kinds")
        if not layouts and wanted is None:
            raise NotByRowError(node, "has no operand with rows")
        return layouts.pop() if layouts else wanted  # type: ignore[return-value]  # checked above

    def _mapped(
        self, node: Node, layout: Layout, operands: Mapping[Node, Layout | None]
    ) -> RowCall:
        """Return the same call of the parts."""
        return RowCall(
            layout,
            {**operands, **_sizes(node)},
            lambda emit, part: emit(
                _target(node), *map_arg(node.args, part), **map_arg(node.kwargs, part)
            ),
        )


def _maps_zero_to_zero(node: Node, known: Mapping[Node, Layout]) -> bool:
    """Return True if a row of zeros of the only operand with rows makes zeros."""
    packet: Any = node.target.overloadpacket  # type: ignore[union-attr]
    (first, *others), rows = _tensors(node), [each for each in _tensors(node) if each in known]
    return (
        packet in _LINEAR
        and len(rows) <= 1
        and (packet is not aten.div or first in rows or not others)
    )


def _target(node: Node) -> Callable[..., Any]:
    assert callable(node.target), "an operator is called"
    return node.target


def _tensors(node: Node) -> list[Node]:
    return [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]


def _sizes(node: Node) -> dict[Node, None]:
    """Return the operands that are numbers, which every part needs."""
    return {n: None for n in node.all_input_nodes if not isinstance(n.meta.get("val"), Tensor)}


def _keeps_shape(node: Node) -> bool:
    before, after = (each.meta["val"].shape for each in (_tensors(node)[0], node))
    return all(map(is_same_size, before, after))


def _summed_dims(node: Node) -> list[int]:
    ndim = _tensors(node)[0].meta["val"].ndim
    return [d % ndim for d in arguments(node).get("dim") or range(ndim)]


def _sums_rows(node: Node, layout: Layout) -> bool:
    """Return True if a sum covers all dims that count rows."""
    ndim = _tensors(node)[0].meta["val"].ndim
    return {*row_dims(layout, ndim)} <= {*_summed_dims(node)} and layout.form is not Form.TRANSPOSED


def _order_of_dims(node: Node) -> list[int]:
    """Return the dims of the operand in the order of the result."""
    args, ndim = arguments(node), _tensors(node)[0].meta["val"].ndim
    order = list(range(ndim))
    if node.target is aten.permute.default:
        return [d % ndim for d in args["dims"]]
    first, second = (args.get(name, at) % ndim for at, name in enumerate(("dim0", "dim1")))
    order[first], order[second] = order[second], order[first]
    return order


def _as_list(dims: Any) -> list[int]:
    """Return an operator's dims: one, several, or None for none."""
    if dims is None:
        return []
    return list(dims) if isinstance(dims, tuple | list) else [dims]


def _by_name(node: Node, args: Mapping[str, Any]) -> Callable[[Emit, ValueOf], Node]:
    """Return a call with these arguments, by their names in the schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    positional = [args[a.name] for a in schema if not a.kwarg_only]
    named = {a.name: args[a.name] for a in schema if a.kwarg_only and a.name in args}

    def make(emit: Emit, part: ValueOf) -> Node:
        return emit(_target(node), *map_arg(positional, part), **map_arg(named, part))

    return make
