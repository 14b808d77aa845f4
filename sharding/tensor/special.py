"""Operators along a dim of which each rank has a share: vocabulary-parallel embedding, softmax,
loss and similar ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from trainload.autograd_trace.graph_calls import converted, wide
from trainload.sharding.analysis.graph_nodes import arguments
from trainload.sharding.tensor.factors import Factor
from trainload.sharding.tensor.links import Links
from trainload.sharding.tensor.placement import Emitter, Place, Unsharded

aten = torch.ops.aten
Results = list[tuple[Node, Place]]


class Partitioner(Protocol):
    """The rewriting of one graph for the ranks of a tensor axis."""

    links: Links
    emit: Emitter

    def value(self, node: Node, place: Place) -> Node:
        """Return a value of the whole graph at a place."""

    def items(self, node: Node, places: Sequence[Place]) -> Results:
        """Return the outputs of a node that has several, each with its place."""


Special = Callable[[Partitioner, Node, Factor], Results]
Fits = Callable[[Links, Node, Factor], bool]
SPECIAL: dict[Any, Special] = {}
"""Operator -> function that runs it on shares of a factor that is special for it."""
_FITS: dict[Any, Fits] = {}


def special(*targets: Any, fits: Fits | None = None) -> Callable[[Special], Special]:
    """Return a decorator that declares how some operators run on shares.

    `fits`: decides for which factors; None for those of which each rank's share is one range of
    indices.
    """

    def declare(function: Special) -> Special:
        SPECIAL.update(dict.fromkeys(targets, function))
        _FITS.update(dict.fromkeys(targets, fits or _is_outermost))
        return function

    return declare


def runs_on_shares(links: Links, node: Node, factor: Factor) -> bool:
    """Return True if an operator can run on shares of a factor, which its operands and results have
    at most once each.
    """
    use = links.use(node)
    is_special = factor in links.factors.leaves(use.special)
    counted = [
        source for source in node.all_input_nodes if not (is_special and source in use.aside)
    ]
    touched = [
        *(dims for source in counted for dims in links.outputs.get(source, ())),
        *links.outputs[node],
    ]
    most = max(
        (
            [f for dim in dims for f in links.factors.leaves(dim)].count(factor)
            for dims in touched
            if dims is not None
        ),
        default=0,
    )
    if most != 1 or factor in links.factors.leaves(use.whole):
        return False
    return not is_special or (node.target in SPECIAL and _FITS[node.target](links, node, factor))


def _is_outermost(links: Links, node: Node, factor: Factor) -> bool:
    holders = [
        dims
        for source in node.all_input_nodes
        for dims in links.outputs.get(source, ())
        if links.holds(dims, factor)
    ]
    leaves = [links.factors.leaves(dim) for dims in holders for dim in dims or ()]
    return all(factors[0] is factor for factors in leaves if factor in factors)


def _can_divide_loss(links: Links, node: Node, factor: Factor) -> bool:
    """Return True if a loss can run on shares of a factor: any shares of its rows, but of its
    classes only one range of indices.
    """
    return links.holds(links.dims(arguments(node)["target"]), factor) or _is_outermost(
        links, node, factor
    )


def _local_indices(at: Partitioner, index: Node, length: int) -> tuple[Node, Node]:
    """Return which indices into a dim are among the `length` elements of this rank, and their
    values within these (otherwise 0).
    """
    emit = at.emit
    local = emit.call(aten.sub.Tensor, index, emit.offset(length))
    inside = emit.call(
        aten.logical_and.default,
        emit.call(aten.ge.Scalar, local, 0),
        emit.call(aten.lt.Scalar, local, length),
    )
    return inside, emit.call(aten.where.self, inside, local, _zero_like(at, local))


def _zero_like(at: Partitioner, like: Node) -> Node:
    value = like.meta["val"]
    return at.emit.call(aten.full.default, [], 0, dtype=value.dtype, device=value.device)


def _masked(at: Partitioner, keep: Node, value: Node) -> Node:
    return at.emit.call(aten.where.self, keep, value, _zero_like(at, value))


@special(aten.embedding.default)
def _embedding(at: Partitioner, node: Node, active: Factor) -> Results:
    args = arguments(node)
    table = at.value(args["weight"], active)
    inside, local = _local_indices(
        at, at.value(args["indices"], Unsharded.WHOLE), table.meta["val"].shape[0]
    )
    embeddings = at.emit.call(aten.embedding.default, table, local, like=node)
    return [
        (_masked(at, at.emit.call(aten.unsqueeze.default, inside, -1), embeddings), Unsharded.TERM)
    ]


@special(aten.embedding_dense_backward.default)
def _embedding_backward(at: Partitioner, node: Node, active: Factor) -> Results:
    args = arguments(node)
    length = args["num_weights"] // at.emit.ranks
    index = at.value(args["indices"], Unsharded.WHOLE)
    inside, local = _local_indices(at, index, length)
    if args["padding_idx"] >= 0:
        inside = at.emit.call(
            aten.logical_and.default,
            inside,
            at.emit.call(aten.ne.Scalar, index, args["padding_idx"]),
        )
    gradient = _masked(
        at,
        at.emit.call(aten.unsqueeze.default, inside, -1),
        at.value(args["grad_output"], Unsharded.WHOLE),
    )
    return [(at.emit.call(node.target, gradient, local, length, -1, False, like=node), active)]  # type: ignore[arg-type]


@special(aten.amax.default, aten.amin.default)
def _extreme(at: Partitioner, node: Node, active: Factor) -> Results:
    args = arguments(node)
    source = at.value(args["self"], active)
    local_extreme = at.emit.call(
        node.target,  # type: ignore[arg-type]
        source,
        args["dim"],
        args["keepdim"],
        like=node,
    )
    return [
        (
            at.emit.reduced(local_extreme, "max" if node.target is aten.amax.default else "min"),
            Unsharded.WHOLE,
        )
    ]


@special(aten.argmax.default)
def _argmax(at: Partitioner, node: Node, active: Factor) -> Results:
    """Return the lowest index of the greatest values, as torch does on one device."""
    emit, args = at.emit, arguments(node)
    source = at.value(args["self"], active)
    ndim = source.meta["val"].ndim
    along = 0 if args["dim"] is None else args["dim"] % ndim
    length = source.meta["val"].shape[along]
    keep = args["keepdim"]
    most = emit.call(aten.amax.default, source, [along], keep)
    index = emit.call(
        aten.add.Tensor, emit.call(aten.argmax.default, source, along, keep), emit.offset(length)
    )
    greatest = emit.reduced(most, "max")
    beyond = emit.call(
        aten.full.default,
        [],
        length * emit.ranks - 1,
        dtype=torch.int64,
        device=index.meta["val"].device,
    )
    index = emit.call(aten.where.self, emit.call(aten.eq.Tensor, most, greatest), index, beyond)
    return [(emit.reduced(index, "min"), Unsharded.WHOLE)]


@special(aten._softmax.default, aten._log_softmax.default)
def _softmax(at: Partitioner, node: Node, active: Factor) -> Results:
    emit, args = at.emit, arguments(node)
    along = [args["dim"]]
    source = at.value(args["self"], active)
    upcast = _upcast(at, source)
    greatest = emit.reduced(emit.call(aten.amax.default, upcast, along, True), "max")
    moved = emit.call(aten.sub.Tensor, upcast, greatest)
    powers = emit.call(aten.exp.default, moved)
    total = emit.reduced(emit.call(aten.sum.dim_IntList, powers, along, True))
    if node.target is aten._softmax.default:
        result = emit.call(aten.div.Tensor, powers, total)
    else:
        result = emit.call(aten.sub.Tensor, moved, emit.call(aten.log.default, total))
    return [(_cast(at, result, node.meta["val"].dtype), active)]


@special(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(at: Partitioner, node: Node, active: Factor) -> Results:
    emit, args = at.emit, arguments(node)
    along = [args["dim"]]
    gradient, output = (
        _upcast(at, at.value(args[name], active)) for name in ("grad_output", "output")
    )
    if node.target is aten._softmax_backward_data.default:
        products = emit.call(aten.mul.Tensor, gradient, output)
        total = emit.reduced(emit.call(aten.sum.dim_IntList, products, along, True))
        input_gradient = emit.call(
            aten.sub.Tensor, products, emit.call(aten.mul.Tensor, output, total)
        )
    else:
        total = emit.reduced(emit.call(aten.sum.dim_IntList, gradient, along, True))
        input_gradient = emit.call(
            aten.sub.Tensor,
            gradient,
            emit.call(aten.mul.Tensor, emit.call(aten.exp.default, output), total),
        )
    return [(_cast(at, input_gradient, node.meta["val"].dtype), active)]


def _upcast(at: Partitioner, value: Node) -> Node:
    """Return the value in at least float32, as torch's own kernels compute."""
    return _cast(at, value, wide(value.meta["val"].dtype))


def _cast(at: Partitioner, value: Node, dtype: torch.dtype) -> Node:
    return converted(at.emit.call, value, dtype)


@special(aten.gather.default)
def _gather(at: Partitioner, node: Node, active: Factor) -> Results:
    args = arguments(node)
    source = at.value(args["self"], active)
    inside, local = _local_indices(
        at, at.value(args["index"], Unsharded.WHOLE), source.meta["val"].shape[args["dim"]]
    )
    return [
        (
            _masked(
                at,
                inside,
                at.emit.call(aten.gather.default, source, args["dim"], local, like=node),
            ),
            Unsharded.TERM,
        )
    ]


@special(aten.nll_loss_forward.default, fits=_can_divide_loss)
def _negative_log_likelihood(at: Partitioner, node: Node, active: Factor) -> Results:
    emit, args = at.emit, arguments(node)
    source = at.value(args["self"], active)
    if at.links.holds(at.links.dims(args["target"]), active):
        return _loss_of_rows(at, node, active)
    counts, inside, local = _local_targets(at, args, source)
    picked = emit.call(
        aten.squeeze.dim,
        emit.call(
            aten.gather.default, source, 1, emit.call(aten.unsqueeze.default, local, 1), like=node
        ),
        1,
    )
    losses = _masked(at, inside, emit.call(aten.neg.default, picked))
    weight = emit.call(aten.sum.default, _cast(at, counts, source.meta["val"].dtype))
    if args["reduction"] == 0:
        return [(losses, Unsharded.TERM), (_zero_like(at, source), Unsharded.WHOLE)]
    total = emit.call(aten.sum.default, losses)
    return [
        (
            emit.call(aten.div.Tensor, total, weight) if args["reduction"] == 1 else total,
            Unsharded.TERM,
        ),
        (weight, Unsharded.WHOLE),
    ]


def _loss_of_rows(at: Partitioner, node: Node, active: Factor) -> Results:
    """Return the loss of this rank's rows: the sum of their losses, divided by the weight of
    all.
    """
    emit, args = at.emit, arguments(node)
    operands = (
        at.value(args["self"], active),
        at.value(args["target"], active),
        _class_weights(at, args),
    )
    reduction = args["reduction"]
    loss_and_weight = emit.call(
        aten.nll_loss_forward.default,
        *operands,
        2 if reduction else 0,
        args["ignore_index"],
        like=node,
    )
    losses, local_weight = (
        emit.call(operator.getitem, loss_and_weight, number) for number in range(2)
    )
    if reduction == 0:
        return [(losses, active), (local_weight, Unsharded.WHOLE)]
    weight = emit.reduced(local_weight)
    return [
        (emit.call(aten.div.Tensor, losses, weight) if reduction == 1 else losses, Unsharded.TERM),
        (weight, Unsharded.WHOLE),
    ]


def _class_weights(at: Partitioner, args: dict[str, Any]) -> Node | None:
    return None if args["weight"] is None else at.value(args["weight"], Unsharded.WHOLE)


@special(aten.nll_loss_backward.default, fits=_can_divide_loss)
def _negative_log_likelihood_backward(at: Partitioner, node: Node, active: Factor) -> Results:
    emit, args = at.emit, arguments(node)
    source = at.value(args["self"], active)
    if at.links.holds(at.links.dims(args["target"]), active):
        gradient = at.value(
            args["grad_output"], active if args["reduction"] == 0 else Unsharded.WHOLE
        )
        weight = at.value(args["total_weight"], Unsharded.WHOLE)
        operands = (gradient, source, at.value(args["target"], active), _class_weights(at, args))
        return [
            (
                emit.call(
                    node.target,  # type: ignore[arg-type]
                    *operands,
                    args["reduction"],
                    args["ignore_index"],
                    weight,
                    like=node,
                ),
                active,
            )
        ]
    _, inside, local = _local_targets(at, args, source)
    gradient = emit.call(aten.neg.default, at.value(args["grad_output"], Unsharded.WHOLE))
    if args["reduction"] == 1:
        gradient = emit.call(
            aten.div.Tensor, gradient, at.value(args["total_weight"], Unsharded.WHOLE)
        )
    if args["reduction"] == 0:
        gradient = emit.call(aten.unsqueeze.default, gradient, 1)
    length = source.meta["val"].shape[1]
    columns = emit.call(
        aten.arange.default, length, dtype=torch.int64, device=source.meta["val"].device
    )
    one_hot = emit.call(aten.eq.Tensor, emit.call(aten.unsqueeze.default, local, 1), columns)
    one_hot = emit.call(
        aten.logical_and.default, one_hot, emit.call(aten.unsqueeze.default, inside, 1)
    )
    return [(_masked(at, one_hot, gradient), active)]


def _local_targets(at: Partitioner, args: dict[str, Any], source: Node) -> tuple[Node, Node, Node]:
    """Return which targets count, which of them are among this rank's classes, and their indices
    there.
    """
    target = at.value(args["target"], Unsharded.WHOLE)
    counts = at.emit.call(aten.ne.Scalar, target, args["ignore_index"])
    inside, local = _local_indices(at, target, source.meta["val"].shape[1])
    return counts, at.emit.call(aten.logical_and.default, inside, counts), local
