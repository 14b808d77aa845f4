"""Delay recomputation until backward needs it, in graphs that a compiler may reorder.

A copy of a forward node reads only values that forward left. Only its place in the graph says that
it belongs to backward, so a compiler that orders and fuses kernels by their inputs may compute it
beside the original node and keep it. Inductor does so with the first operators of a checkpoint,
matrix products too: it fuses copies of normalisations with the originals. Therefore the copies'
inputs are made to depend on a gradient:

    where(isnan(one element of the gradient), input, input)

Its value is the input, whatever the gradient is. It is fused into the kernel that reads the input,
and costs a read of one element. jax.checkpoint uses optimization_barrier for the same purpose.
`torch.ops.higher_order.control_deps` does not suffice: it orders only nodes that are kernels
already when they are lowered, and would miss pointwise operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from trainload.autograd_trace.graph_calls import append
from trainload.autograd_trace.graphs import TANGENT
from trainload.autograd_trace.recompute.rematerialisation import RECOMPUTES, REPEATED
from trainload.capture.operators import is_collective, is_overload, is_view

aten = torch.ops.aten

_CALLS = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "linear",
        "matmul",
        "convolution",
        "_convolution",
    }
    | {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
    | {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
"""Operators that compilers implement by library calls. Their inputs must be in memory, so delaying
one costs a copy of it.
"""


def hold_back(module: GraphModule) -> None:
    """Make the nodes that recompute forward values depend on a gradient computed right before them.
    In place; no value changes.

    Args:
        module: a step graph after `rematerialisation.recompute`, as a plan has rewritten it, or one
            part of a pipeline stage. Every node has `meta["val"]`.
    """
    graph = module.graph
    nodes = list(graph.nodes)
    if not any(RECOMPUTES in node.meta for node in nodes):
        return
    backward = [i for i, n in enumerate(nodes) if _is_of_backward(n)]
    if not backward:
        return  # the forward part of a pipeline stage
    begin = next((i for i, n in enumerate(nodes) if n.name == TANGENT), backward[0])
    late: set[Node] = (
        set() if any(REPEATED in node.meta for node in nodes[:begin]) else {nodes[backward[0]]}
    )
    """Nodes that cannot be computed before forward is over and, in the backward part, not before
    `last`.
    """
    last: Node | None = None
    guards: dict[Node, Node] = {}
    copied: dict[Node, Node] = {}
    for node in nodes[:begin]:
        if REPEATED in node.meta or any(s in late for s in node.all_input_nodes):
            late.add(node)
            last = node if _has_an_element(node) else last
    for node in nodes[begin:]:
        if RECOMPUTES not in node.meta:
            if node in late or any(s in late for s in node.all_input_nodes):
                late.add(node)
                last = node if _has_an_element(node) else last
                copied.clear()
            continue
        sources = [s for s in node.all_input_nodes if isinstance(s.meta.get("val"), Tensor)]
        if any(s in late and RECOMPUTES in s.meta for s in sources):
            late.add(node)
        elif last is not None and sources and is_overload(node.target) and not is_view(node):
            guard = guards[last] = guards.get(last) or _insert_guard(graph, last, node)
            if node.target.overloadpacket.__name__ in _CALLS:
                source = _main_operand(sources)
                copied[source] = copied.get(source) or _delay(graph, source, guard, node)
                node.replace_input_with(source, copied[source])
            else:
                for source in sources:
                    node.replace_input_with(source, _delay(graph, source, guard, node))
            late.add(node)
    graph.lint()
    module.recompile()


def _is_of_backward(node: Node) -> bool:
    """Return True if a node is part of the backward pass and not a copy of a forward node."""
    return node.meta.get("partitioner_tag") == "is_backward" and RECOMPUTES not in node.meta


def _has_an_element(node: Node) -> bool:
    """Return True if the first element of a node's value can be read. The result of a collective
    may still be in flight.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or is_collective(node):
        return False
    return value.is_floating_point() and all(
        statically_known_true(size >= 1) for size in value.shape
    )


def _main_operand(sources: list[Node]) -> Node:
    """Return the first input of a library call that is not a bias. It is copied, so only one input
    is delayed.
    """
    return next((s for s in sources if s.meta["val"].ndim > 1), sources[0])


def _insert_guard(graph: Graph, gradient: Node, before: Node) -> Node:
    """Insert a 0-dim bool that is available no earlier than a gradient."""
    mode: Any = gradient.meta["val"].fake_mode
    with graph.inserting_before(before):
        while gradient.meta["val"].ndim:
            gradient = append(graph, mode, aten.select.int, gradient, 0, 0)
        return append(graph, mode, aten.isnan.default, gradient)


def _delay(graph: Graph, source: Node, guard: Node, before: Node) -> Node:
    with graph.inserting_before(before):
        mode: Any = source.meta["val"].fake_mode
        return append(graph, mode, aten.where.self, guard, source, source)
