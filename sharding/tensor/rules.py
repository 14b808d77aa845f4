"""Rules for the dims of operators that move elements, multiply matrices, or work element by
element.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from trainload.sharding.analysis.graph_nodes import arguments
from trainload.sharding.tensor.factors import Dim, Dims
from trainload.sharding.tensor.links import Links, Outputs, pointwise, rule, sizes

aten = torch.ops.aten


@pointwise
def _elementwise(links: Links, node: Node) -> Outputs:
    """Tie the dims of broadcast operands."""
    shape = sizes(node.meta["val"])
    dims: list[Dim | None] = [None] * len(shape)
    for source in node.all_input_nodes:
        if not links.has_dims(source):
            continue
        source_sizes, source_dims = sizes(source.meta["val"]), links.dims(source)
        for back in range(1, len(source_dims) + 1):
            if source_sizes[-back] == 1 and shape[-back] != 1:
                continue
            previous = dims[-back]
            if previous is None:
                dims[-back] = source_dims[-back]
            else:
                links.factors.tie(previous, source_dims[-back])
    return (
        tuple(
            links.factors.dim(size) if dim is None else dim
            for dim, size in zip(dims, shape, strict=True)
        ),
    )


rule(
    aten._to_copy,
    aten.detach,
    aten.alias,
    aten.lift_fresh_copy,
    aten.fill,
    aten.copy,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.elu_backward,
    aten.softplus_backward,
    aten.mish_backward,
    aten.hardswish_backward,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
)(_elementwise)


@rule(
    aten.full,
    aten.zeros,
    aten.ones,
    aten.empty,
    aten.scalar_tensor,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.new_empty,
)
def _new_tensor(links: Links, node: Node) -> Outputs:
    """Return untied dims: any part of a new tensor can be made alone."""
    return links.fresh(node)


@rule(operator.getitem)
def _item(links: Links, node: Node) -> Outputs:
    source, number = node.args
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return links.fresh(node)
    return (links.outputs[source][number],)  # type: ignore[index]


# Moving elements


@rule(aten.t, aten.transpose, aten.permute)
def _permuted(links: Links, node: Node) -> Outputs:
    source = node.args[0]
    dims = list(links.dims(source))  # type: ignore[arg-type]
    if node.target.overloadpacket is aten.permute:  # type: ignore[union-attr]
        return (tuple(dims[at] for at in node.args[1]),)  # type: ignore[union-attr, index]
    one, other = node.args[1:] if len(node.args) == 3 else (0, len(dims) - 1)
    if dims:
        dims[one], dims[other] = dims[other], dims[one]  # type: ignore[index]
    return (tuple(dims),)


@rule(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze)
def _viewed(links: Links, node: Node) -> Outputs:
    dims = links.factors.regroup(links.dims(node.args[0]), sizes(node.meta["val"]))  # type: ignore[arg-type]
    return links.require_whole(node) if dims is None else (dims,)


@rule(aten.expand)
def _expanded(links: Links, node: Node) -> Outputs:
    source = node.args[0]
    source_dims = list(links.dims(source))  # type: ignore[arg-type]
    source_sizes, shape = sizes(source.meta["val"]), sizes(node.meta["val"])  # type: ignore[union-attr]
    source_dims, source_sizes = (
        [()] * (len(shape) - len(source_dims)) + source_dims,
        [1] * (len(shape) - len(source_sizes)) + source_sizes,
    )
    return (
        tuple(
            d if was == size else links.factors.dim(size)
            for d, was, size in zip(source_dims, source_sizes, shape, strict=True)
        ),
    )


@rule(aten.slice)
def _sliced(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    source, at = args["self"], args["dim"]
    dims = list(links.dims(source))
    if _whole_slice(node):
        return (tuple(dims),)
    links.use(node).whole += dims[at]
    dims[at] = links.whole_dim(node, sizes(node.meta["val"])[at])
    return (tuple(dims),)


def _whole_slice(node: Node) -> bool:
    """Return True if a slice selects everything."""
    args = arguments(node)
    at = args["dim"]
    return (
        bool(sizes(node.meta["val"])[at] == sizes(args["self"].meta["val"])[at])
        and args["step"] == 1
    )


@rule(aten.slice_backward, aten.select_backward)
def _slice_backward(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    shape = sizes(node.meta["val"])
    at = args["dim"] % len(shape)
    dims = list(links.dims(args["grad_output"]))
    if node.target is aten.select_backward.default:
        dims.insert(at, ())
    else:
        links.use(node).whole += dims[at]
    dims[at] = links.whole_dim(node, shape[at])
    return (tuple(dims),)


@rule(aten.select)
def _selected(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    dims = list(links.dims(args["self"]))
    links.use(node).whole += dims.pop(args["dim"])
    return (tuple(dims),)


@rule(aten.constant_pad_nd)
def _padded(links: Links, node: Node) -> Outputs:
    source = node.args[0]
    dims = list(links.dims(source))  # type: ignore[arg-type]
    before = sizes(source.meta["val"])  # type: ignore[union-attr]
    for at, (was, size) in enumerate(zip(before, sizes(node.meta["val"]), strict=True)):
        if was != size:
            links.use(node).whole += dims[at]
            dims[at] = links.whole_dim(node, size)
    return (tuple(dims),)


@rule(aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
def _divided(links: Links, node: Node) -> Outputs:
    """Split a dim: for equal pieces, the dim is (pieces, rest), and the pieces share the rest."""
    args = arguments(node)
    pieces = node.meta["val"]
    dims = list(links.dims(args["self"]))
    at = args["dim"] % len(dims)
    if node.target is aten.unbind.int:
        links.use(node).whole += dims.pop(at)
        return (tuple(dims),) * len(pieces)
    lengths = [sizes(piece)[at] for piece in pieces]
    halves = (
        links.factors.regroup((dims[at],), (len(lengths), lengths[0]))
        if len(set(lengths)) == 1
        else None
    )
    if halves is None:
        links.use(node).whole += dims[at]
        return tuple(
            (*dims[:at], links.whole_dim(node, length), *dims[at + 1 :]) for length in lengths
        )
    links.use(node).whole += halves[0]
    return ((*dims[:at], halves[1], *dims[at + 1 :]),) * len(pieces)


@rule(aten.cat, aten.stack)
def _joined(links: Links, node: Node) -> Outputs:
    """Join dims: the reverse of `_divided`."""
    args = arguments(node)
    shape = sizes(node.meta["val"])
    at = args["dim"] % len(shape)
    sources: Sequence[Node] = args["tensors"]
    if node.target is aten.cat.default and len(shape) > 1:
        # cat ignores empty tensors of one dim
        sources = [s for s in sources if len(sizes(s.meta["val"])) > 1]
    parts = [list(links.dims(source)) for source in sources]
    if node.target is aten.stack.default:
        for part in parts:
            part.insert(at, ())
    lengths = (
        {sizes(source.meta["val"])[at] for source in sources}
        if node.target is aten.cat.default
        else {1}
    )
    first = parts[0]
    if len(parts) == 1 and node.target is aten.cat.default:
        return (tuple(first),)
    for part in parts[1:]:
        links.tie(first[:at] + first[at + 1 :], part[:at] + part[at + 1 :])
        if len(lengths) == 1:
            links.factors.tie(first[at], part[at])
    if len(lengths) == 1:
        pieces = links.whole_dim(node, len(parts))
        return ((*first[:at], (*pieces, *first[at]), *first[at + 1 :]),)
    for part in parts:
        links.use(node).whole += part[at]
    return ((*first[:at], links.whole_dim(node, shape[at]), *first[at + 1 :]),)


@rule(aten.cumsum, aten.flip, aten.tril, aten.triu, aten.roll)
def _along_dim(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    dims = links.dims(args["self"])
    ats = [-1, -2] if "diagonal" in args else [args["dim"]] if "dim" in args else args["dims"]
    for at in ats or range(len(dims)):
        links.use(node).whole += dims[at]
    return (dims,)


# Matrices


@rule(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot)
def _multiplied(links: Links, node: Node) -> Outputs:
    *bias, left, right = (argument for argument in node.args[:3] if isinstance(argument, Node))
    one, other = links.dims(left), links.dims(right)
    batch: Dims = ()
    if len(one) == 3:
        links.factors.tie(one[0], other[0])
        batch, one, other = one[:1], one[1:], other[1:]
    links.factors.tie(one[-1], other[0])
    result = (*batch, *one[:-1], *other[1:])
    use = links.use(node)
    use.contracted = (list(one[-1]),)
    for added in bias:
        use.once.append(added)
        added_dims = links.dims(added)
        for back in range(1, len(added_dims) + 1):
            if sizes(added.meta["val"])[-back] == sizes(node.meta["val"])[-back]:
                links.factors.tie(result[-back], added_dims[-back])
    return (result,)


# Reductions


@rule(aten.sum, aten.mean)
def _summed(links: Links, node: Node) -> Outputs:
    dims, rest = _reduced(links, node)
    links.use(node).contracted = (dims,)
    return (rest,)


@rule(
    aten.amax,
    aten.amin,
    aten.argmax,
    aten.argmin,
    aten.any,
    aten.all,
    aten.prod,
    aten.var,
    aten.std,
    aten.logsumexp,
    aten.var_mean,
)
def _reduction(links: Links, node: Node) -> Outputs:
    dims, rest = _reduced(links, node)
    use = links.use(node)
    special = node.target in (aten.amax.default, aten.amin.default) or (
        node.target is aten.argmax.default and len(_reduced_dims(node)) == 1
    )
    (use.special if special else use.whole).extend(dims)
    return (rest,) * (2 if node.target.overloadpacket is aten.var_mean else 1)  # type: ignore[union-attr]


def _reduced_dims(node: Node) -> list[int]:
    """Return the dims that are reduced: all of them if none is given."""
    args = arguments(node)
    dim = args.get("dim")
    ndim = args["self"].meta["val"].ndim
    if dim is None or dim == []:
        return list(range(ndim))
    return [at % ndim for at in ([dim] if isinstance(dim, int) else dim)] if ndim else []


def _reduced(links: Links, node: Node) -> tuple[list, Dims]:  # type: ignore[type-arg]
    args = arguments(node)
    dims, ats = links.dims(args["self"]), _reduced_dims(node)
    rest = [() if at in ats else dim for at, dim in enumerate(dims)]
    keepdim = args.get("keepdim")
    return [f for at in ats for f in dims[at]], tuple(
        dim for at, dim in enumerate(rest) if keepdim or at not in ats
    )
