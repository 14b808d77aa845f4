"""Rules for the dims of layers' and losses' operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from trainload.sharding.analysis.graph_nodes import arguments
from trainload.sharding.tensor.factors import Dim, Dims
from trainload.sharding.tensor.links import Links, Outputs, rule, sizes

aten = torch.ops.aten


def _output_sizes(node: Node) -> list[list[Any] | None]:
    """Return the sizes of each output; None for one that is not a tensor."""
    return [sizes(value) if isinstance(value, torch.Tensor) else None for value in node.meta["val"]]


def _whole_dims(links: Links, node: Node, lengths: list[Any] | None) -> Dims | None:
    """Return whole dims of an output, tied to nothing else; None if it is not a tensor."""
    return None if lengths is None else tuple(links.whole_dim(node, length) for length in lengths)


# Norms


@rule(aten.native_layer_norm, aten._fused_rms_norm)
def _layer_norm(links: Links, node: Node) -> Outputs:
    source, shape, *affine = node.args[:4]
    dims = links.dims(source)  # type: ignore[arg-type]
    first = len(dims) - len(shape)  # type: ignore[arg-type]
    links.use(node).whole += [f for dim in dims[first:] for f in dim]
    for parameter in affine:
        if isinstance(parameter, Node):
            links.tie(links.dims(parameter), dims[first:])
    statistics = (*dims[:first], *[()] * len(shape))  # type: ignore[arg-type]
    return (dims, *[statistics] * (len(node.meta["val"]) - 1))


@rule(aten.native_layer_norm_backward, aten._fused_rms_norm_backward)
def _layer_norm_backward(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    dims = links.dims(args["input"])
    links.tie(links.dims(args["grad_out"] if "grad_out" in args else args["grad_output"]), dims)
    first = len(dims) - len(args["normalized_shape"])
    for name in ("mean", "rstd"):
        if name in args:
            links.tie(links.dims(args[name])[:first], dims[:first])
    use = links.use(node)
    use.whole += [f for dim in dims[first:] for f in dim]
    rows = [f for dim in dims[:first] for f in dim]
    affine = tuple(None if lengths is None else dims[first:] for lengths in _output_sizes(node)[1:])
    use.contracted = ([], *[rows] * len(affine))
    return (dims, *affine)


@rule(
    aten.native_batch_norm,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit,
    aten.cudnn_batch_norm,
)
def _batch_norm(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    dims = links.dims(args["input"])
    return _batch_norm_outputs(links, node, args, dims)


@rule(aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward)
def _batch_norm_backward(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    dims = links.dims(args["input"])
    links.tie(links.dims(args["grad_out"] if "grad_out" in args else args["grad_output"]), dims)
    return _batch_norm_outputs(links, node, args, dims)


def _batch_norm_outputs(links: Links, node: Node, args: dict[str, Any], dims: Dims) -> Outputs:
    channels = dims[1]
    links.use(node).whole += [f for at, dim in enumerate(dims) if at != 1 for f in dim]
    for value in args.values():
        if isinstance(value, Node) and links.has_dims(value) and len(links.dims(value)) == 1:
            links.factors.tie(links.dims(value)[0], channels)
    outputs: list[Dims | None] = [dims]
    for lengths in _output_sizes(node)[1:]:
        per_channel = lengths is not None and len(lengths) == 1 and lengths[0] != 0
        outputs.append((channels,) if per_channel else _whole_dims(links, node, lengths))
    return tuple(outputs)


# Attention


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
def _attention(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    query, value = _tie_heads(links, node, args)
    outputs: list[Dims | None] = [(*query[:3], value[3])]
    for lengths in _output_sizes(node)[1:]:
        query_sizes = sizes(args["query"].meta["val"])[:3]
        if lengths == query_sizes:
            outputs.append(query[:3])
        elif lengths is not None and len(lengths) >= 2 and lengths[:2] == query_sizes[:2]:
            outputs.append((*query[:2], *(links.whole_dim(node, n) for n in lengths[2:])))
        else:
            outputs.append(_whole_dims(links, node, lengths))
    return tuple(outputs)


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
def _attention_backward(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    _tie_heads(links, node, args)
    gradients = [links.dims(args[name]) for name in ("query", "key", "value")]
    return (*gradients, *(_whole_dims(links, node, lengths) for lengths in _output_sizes(node)[3:]))


def _tie_heads(links: Links, node: Node, args: dict[str, Any]) -> tuple[Dims, Dims]:
    """Tie batch rows and heads, which are independent. A share of the queries may attend to all
    keys.

    Returns:
        The dims of query and value.
    """
    query, key, value = (links.dims(args[name]) for name in ("query", "key", "value"))
    whole = links.use(node).whole
    for dims in (query, key, value):
        links.use(node).special += dims[2]
        whole += dims[3]
    for at in (0, 1):
        for dims in (key, value):
            if sizes(args["query"].meta["val"])[at] == sizes(args["key"].meta["val"])[at]:
                links.factors.tie(query[at], dims[at])
            else:
                whole += [*query[at], *dims[at]]
    for name in ("attn_mask", "attn_bias", "grad_out", "grad_output", "out", "logsumexp"):
        operand = args.get(name)
        if not isinstance(operand, Node):
            continue
        dims = links.dims(operand)
        masks = name in ("attn_mask", "attn_bias")
        if masks:
            links.use(node).aside.append(operand)
        for at in range(len(dims)):
            back = at - len(dims) if masks else at - 4
            alike = (
                back == -2
                and not masks
                and sizes(operand.meta["val"])[at] == sizes(args["query"].meta["val"])[2]
            )
            if (back in (-4, -3) or alike) and dims[at]:
                links.factors.tie(query[back], dims[at])
            elif not (masks and back in (-2, -1)):
                whole += dims[at]
    return query, value


# Tables and losses


@rule(aten.embedding)
def _embedding(links: Links, node: Node) -> Outputs:
    table, at = node.args[:2]
    rows, *features = links.dims(table)  # type: ignore[arg-type]
    links.use(node).special += rows
    return ((*links.dims(at), *features),)  # type: ignore[arg-type]


@rule(aten.embedding_dense_backward)
def _embedding_backward(links: Links, node: Node) -> Outputs:
    gradient, at, rows = node.args[:3]
    lines = links.dims(at)  # type: ignore[arg-type]
    dims = links.dims(gradient)  # type: ignore[arg-type]
    links.tie(dims[: len(lines)], lines)
    table = links.factors.dim(rows)
    use = links.use(node)
    use.special += table
    use.contracted = ([f for line in lines for f in line],)
    return ((table, *dims[len(lines) :]),)


@rule(aten._softmax, aten._log_softmax)
def _softmax(links: Links, node: Node) -> Outputs:
    dims = links.dims(node.args[0])  # type: ignore[arg-type]
    links.use(node).special += dims[node.args[1]]  # type: ignore[index]
    return (dims,)


@rule(aten._softmax_backward_data, aten._log_softmax_backward_data)
def _softmax_backward(links: Links, node: Node) -> Outputs:
    gradient, output, at = node.args[:3]
    dims = links.dims(output)  # type: ignore[arg-type]
    links.tie(links.dims(gradient), dims)  # type: ignore[arg-type]
    links.use(node).special += dims[at]  # type: ignore[index]
    return (dims,)


@rule(aten.gather)
def _gather(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    source, at, index = links.dims(args["self"]), args["dim"], links.dims(args["index"])
    use = links.use(node)
    use.special += source[at]
    use.whole += index[at]
    source_sizes, index_sizes = sizes(args["self"].meta["val"]), sizes(args["index"].meta["val"])
    for number, (one, other) in enumerate(zip(source, index, strict=True)):
        if number == at % len(source):
            continue
        if source_sizes[number] == index_sizes[number]:
            links.factors.tie(one, other)
        else:
            use.whole += [*one, *other]
    return (index,)


@rule(aten.nll_loss_forward, aten.nll_loss_backward)
def _negative_log_likelihood(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    source = links.dims(args["self"])
    target = links.dims(args["target"])
    use = links.use(node)
    links.tie(source[:-1], target)
    use.special += [f for dim in target for f in dim]
    (use.special if args["weight"] is None else use.whole).extend(source[-1])
    if "grad_output" in args:
        return (source,)
    return tuple(target if len(lengths or ()) else () for lengths in _output_sizes(node))


# Images


@rule(aten.convolution)
def _convolution(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    source, weight = links.dims(args["input"]), links.dims(args["weight"])
    use = links.use(node)
    use.whole += [f for dims in (source, weight) for dim in dims[2:] for f in dim]
    shape = sizes(node.meta["val"])
    if args["transposed"] or args["groups"] != 1:
        use.whole += [*source[1], *weight[0], *weight[1]]
        channels: Dim = links.whole_dim(node, shape[1])
    else:
        links.factors.tie(source[1], weight[1])
        use.contracted = (list(weight[1]),)
        channels = weight[0]
    if args["bias"] is not None:
        use.once.append(args["bias"])
        links.factors.tie(links.dims(args["bias"])[0], channels)
    return ((source[0], channels, *(links.whole_dim(node, n) for n in shape[2:])),)


@rule(aten.convolution_backward)
def _convolution_backward(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    gradient, source, weight = (
        links.dims(args[name]) for name in ("grad_output", "input", "weight")
    )
    use = links.use(node)
    links.factors.tie(gradient[0], source[0])
    use.whole += [f for dims in (gradient, source, weight) for dim in dims[2:] for f in dim]
    channels = gradient[1]
    if args["transposed"] or args["groups"] != 1:
        use.whole += [
            f for dims in (gradient[1:2], source[1:2], weight[:2]) for dim in dims for f in dim
        ]
        use.contracted = ([], list(source[0]), list(source[0]))
    else:
        links.factors.tie(channels, weight[0])
        links.factors.tie(source[1], weight[1])
        use.contracted = (list(weight[0]), list(source[0]), list(source[0]))
    gradients: tuple[Dims, ...] = (source, weight, (channels,))
    return tuple(
        dims if is_needed else None
        for dims, is_needed in zip(gradients, args["output_mask"], strict=True)
    )


@rule(
    aten.max_pool2d_with_indices,
    aten.avg_pool2d,
    aten._adaptive_avg_pool2d,
    aten.upsample_nearest2d,
    aten.upsample_bilinear2d,
)
def _pooled(links: Links, node: Node) -> Outputs:
    source = node.args[0]
    dims = links.dims(source)  # type: ignore[arg-type]
    links.use(node).whole += [f for dim in dims[2:] for f in dim]
    values = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else (node.meta["val"],)
    first = (*dims[:2], *(links.whole_dim(node, n) for n in sizes(values[0])[2:]))
    return (first,) * len(values)


@rule(
    aten.max_pool2d_with_indices_backward,
    aten.avg_pool2d_backward,
    aten._adaptive_avg_pool2d_backward,
)
def _pooled_backward(links: Links, node: Node) -> Outputs:
    args = arguments(node)
    dims = links.dims(args["self"])
    links.tie(links.dims(args["grad_output"])[:2], dims[:2])
    links.use(node).whole += [
        f for source in (dims, links.dims(args["grad_output"])) for dim in source[2:] for f in dim
    ]
    return (dims,)
