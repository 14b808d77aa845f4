"""Attention over positions of which each rank has a share: its own queries attend to all keys,
which are gathered for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from trainload.sharding.analysis.graph_nodes import arguments
from trainload.sharding.tensor.factors import Factor
from trainload.sharding.tensor.links import Links
from trainload.sharding.tensor.placement import ShareLayout, Unsharded
from trainload.sharding.tensor.special import Partitioner, Results, special

aten = torch.ops.aten


def _fits(links: Links, node: Node, factor: Factor) -> bool:
    """Return True if the operator can run on a share of its queries: without dropout of its own,
    and with sums per query.
    """
    args = arguments(node)
    sums = links.outputs[node][1] if "logsumexp" not in args else links.dims(args["logsumexp"])
    return (
        args["dropout_p"] == 0.0
        and factor in links.factors.leaves(links.dims(args["query"])[2])
        and links.holds(sums, factor)
    )


@special(aten._scaled_dot_product_flash_attention_for_cpu.default, fits=_fits)
def _attention(at: Partitioner, node: Node, active: Factor) -> Results:
    args = arguments(node)
    query, key, value = (
        at.value(args["query"], active),
        at.value(args["key"], Unsharded.WHOLE),
        at.value(args["value"], Unsharded.WHOLE),
    )
    more = {"attn_mask": _mask(at, args, active), "scale": args["scale"]}
    outputs = at.emit.call(node.target, query, key, value, 0.0, False, like=node, **more)  # type: ignore[arg-type]
    return at.items(outputs, (active, active))


@special(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, fits=_fits)
def _attention_backward(at: Partitioner, node: Node, active: Factor) -> Results:
    args = arguments(node)
    own = {name: at.value(args[name], active) for name in ("grad_out", "query", "out", "logsumexp")}
    whole = [at.value(args[name], Unsharded.WHOLE) for name in ("key", "value")]
    more = {"attn_mask": _mask(at, args, active), "scale": args["scale"]}
    operands = (own["grad_out"], own["query"], *whole, own["out"], own["logsumexp"], 0.0, False)
    gradients = at.emit.call(node.target, *operands, like=node, **more)  # type: ignore[arg-type]
    return at.items(gradients, (active, Unsharded.TERM, Unsharded.TERM))


def _mask(at: Partitioner, args: dict[str, Any], active: Factor) -> Node | None:
    """Return the rows of the mask that belong to this rank's queries."""
    emit, query, keys = at.emit, args["query"].meta["val"], args["key"].meta["val"].shape[2]
    if args["is_causal"]:
        own = query.shape[2] // emit.ranks
        device = query.device
        rows = emit.call(
            aten.add.Tensor,
            emit.call(aten.arange.default, own, dtype=torch.int64, device=device),
            emit.offset(own),
        )
        columns = emit.call(aten.arange.default, keys, dtype=torch.int64, device=device)
        visible = emit.call(aten.ge.Tensor, emit.call(aten.unsqueeze.default, rows, 1), columns)
        zero, never = (
            emit.call(aten.full.default, [], number, dtype=query.dtype, device=device)
            for number in (0.0, -math.inf)
        )
        return emit.call(aten.where.self, visible, zero, never)
    if args["attn_mask"] is None:
        return None
    mask = at.value(args["attn_mask"], Unsharded.WHOLE)
    rows_at = mask.meta["val"].ndim - 2
    return (
        mask
        if mask.meta["val"].shape[rows_at] == 1
        else emit.own_share(mask, ShareLayout(rows_at, 1, query.shape[2] // emit.ranks))
    )
