"""Low-rank adapters in a captured graph (Hu et al. 2021, "LoRA").

Beside each linear layer's weight W (out, in) there are A (rank, in) and B (out, rank), and the
layer computes x W^T + scale (x A^T) B^T.

W + scale B A is never computed: it would be as large as W, be kept for backward, and have a
gradient of the same size, which costs as much as the gradient of W that adapters are meant to save.
Computed by x, as here, a row costs 2 rank (in + out) more multiplications in forward and twice that
in backward; W's own gradient would cost 2 in out. So it pays up to a rank of about in out / (3 (in
+ out)), a sixth of a square layer's width, and uses less memory at any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from trainload.capture.operators import body_at, is_higher_order, is_overload
from trainload.capture.source.source_place import place_of_node
from trainload.capture.watching.higher_order import CHECKPOINT, SELECTIVE

aten = torch.ops.aten
_HOP: Any = torch.ops.higher_order
_OPERANDS = {
    _HOP.wrap_with_autocast: 5,
    _HOP.wrap_with_set_grad_enabled: 2,
    CHECKPOINT: 1,
    SELECTIVE: 2,
}
"""Regions, which run their body once on their operands -> the index of the first operand among
their arguments.
"""
_PROVENANCE_KEYS = ("stack_trace", "nn_module_stack", "torch_fn")


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter of a parameter.

    Attributes:
        weight: the parameter's name.
        down: name of A.
        up: name of B.
        rank: the adapter's rank.
        scale: factor of B A.
    """

    weight: str
    down: str
    up: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a parameter by an operator.

    Attributes:
        operator: name of the operator.
        linear: True if the parameter is a linear layer's weight.
        place: the user's file and line, if known.
    """

    operator: str
    linear: bool
    place: str


def uses_of(module: GraphModule, weight: Node) -> list[Use]:
    """Return a graph's uses of a parameter, including those in regions.

    Args:
        module: the graph, or a body of it.
        weight: the placeholder of the parameter.
    """
    uses: list[Use] = []
    for node in weight.users:
        regions = _regions(module, node, weight)
        if regions is not None:
            for body, place in regions:
                uses += uses_of(body, _placeholders(body.graph)[place])
        elif node.op != "output":
            uses.append(Use(_operator_name(node), _is_linear(node, weight), place_of_node(node)))
        else:
            uses.append(Use("returned as it is", False, place_of_node(weight)))
    return uses


def adapt(
    module: GraphModule, weight: Node, adapter: LowRank, after: Node | None = None
) -> tuple[Node, Node]:
    """Add an adapter to a graph: two inputs, and the computation with them.

    Args:
        module: the graph; changed in place.
        weight: the placeholder of a parameter; all its uses are linear (`uses_of`).
        adapter: the adapter.
        after: the placeholder that the new ones follow; None for the last one.

    Returns:
        The placeholders of A and B.
    """
    graph = module.graph
    last = _placeholders(graph)[-1] if after is None else after
    rows, columns = weight.meta["val"].shape
    with graph.inserting_after(last):
        up = _add_placeholder(graph, f"{weight.name}_up", weight, (rows, adapter.rank))
    with graph.inserting_after(last):
        down = _add_placeholder(graph, f"{weight.name}_down", weight, (adapter.rank, columns))
    for node in list(weight.users):
        regions = _regions(module, node, weight)
        if regions is None:
            _add_output(graph, node, down, up, adapter)
        elif regions:
            for body, place in regions:
                adapt(body, _placeholders(body.graph)[place], adapter)
            node.args = (*node.args, *(value for _ in regions for value in (down, up)))
    module.recompile()
    return down, up


def _add_output(graph: Graph, node: Node, down: Node, up: Node, adapter: LowRank) -> None:
    """Make the users of a linear layer's result use its sum with the adapter's."""
    value = node.meta["val"]
    provenance = {key: node.meta[key] for key in _PROVENANCE_KEYS if key in node.meta}
    narrow = (*value.shape[:-1], adapter.rank)
    at = node

    def call(target: Any, *args: Any, shape: Sequence[Any]) -> Node:
        nonlocal at
        with graph.inserting_after(at):
            at = graph.call_function(target, args)
        with value.fake_mode:
            at.meta = {
                **provenance,
                "val": torch.empty(shape, dtype=value.dtype, device=value.device),
            }
        return at

    inner = call(aten.linear.default, node.args[0], down, shape=narrow)
    # scale here and not the result, because the inner value is the smallest
    if adapter.scale != 1.0:
        inner = call(aten.mul.Tensor, inner, adapter.scale, shape=narrow)
    outer = call(aten.linear.default, inner, up, shape=value.shape)
    total = call(aten.add.Tensor, node, outer, shape=value.shape)
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def _regions(module: GraphModule, node: Node, weight: Node) -> list[tuple[GraphModule, int]] | None:
    """Return the bodies that a node passes a parameter to, with its input number in each; None if
    the node is not a region.
    """
    start = _OPERANDS.get(node.target)
    if start is None or weight not in node.args[start:]:
        return None
    body = next(
        candidate
        for value in node.args[:start]
        if isinstance(value, Node) and (candidate := body_at(module, value)) is not None
    )
    return [(body, place) for place, value in enumerate(node.args[start:]) if value is weight]


def _is_linear(node: Node, weight: Node) -> bool:
    return node.target is aten.linear.default and [value is weight for value in node.args] in (
        [False, True],
        [False, True, False],
    )


def _operator_name(node: Node) -> str:
    if is_overload(node.target) or is_higher_order(node.target):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _add_placeholder(graph: Graph, name: str, like: Node, shape: Sequence[Any]) -> Node:
    node = graph.placeholder(name)
    value = like.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(shape, dtype=value.dtype, device=value.device)
    return node
