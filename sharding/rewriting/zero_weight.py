"""Ignore microbatches whose weight is 0 (because every label is ignored, say): they add nothing to
an update, whatever their loss and gradients.

The mean over nothing is NaN, and so is its gradient. 0 times either is still NaN, and would reach
the other ranks and microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import ops
from torch.fx import Node

from trainload.autograd_trace.graph_calls import append
from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.sharding.analysis.graph_nodes import (
    computed_from,
    copy_of,
    ends,
    mode_of,
)

aten = ops.aten
_MEANS = (Role.LOSS, Role.METRIC)


def ignore_zero_weight(step: StepGraph) -> StepGraph:
    """Return the same step graph with loss, metrics and gradients set to 0 where the weight is 0.

    A graph without a loss, or one that is weighted by its number of rows, is returned as it is.

    Args:
        step: step graph of one rank of the tensor axis.
    """
    if not _has_own_weight(step):
        return step
    made = copy_of(step)
    graph = made.module.graph
    results: Any = graph.output_node().args[0]
    mode, outputs = (
        mode_of(graph.find_nodes(op="placeholder")),
        list(zip(step.outputs, results, strict=True)),
    )
    order = {node: place for place, node in enumerate(graph.nodes)}
    backward = next((node for node in order if node.name == TANGENT), graph.output_node())
    with graph.inserting_before(backward):  # forward's outputs are computed in forward
        nothing = append(graph, mode, aten.eq.Scalar, _weight(step, results), 0)
        means = dict.fromkeys(node for port, node in outputs if port.role in _MEANS)
        masked = {
            mean: append(graph, mode, aten.masked_fill.Scalar, mean, nothing, 0) for mean in means
        }
    for gradient in dict.fromkeys(node for port, node in outputs if port.role is Role.GRADIENT):
        with graph.inserting_after(max(gradient, backward, key=order.__getitem__)):
            masked[gradient] = append(graph, mode, aten.masked_fill.Scalar, gradient, nothing, 0)
    own = (*_MEANS, Role.GRADIENT)
    graph.output_node().args = (
        tuple(masked[node] if port.role in own else node for port, node in outputs),
    )
    return made


def _has_own_weight(step: StepGraph) -> bool:
    """Return True if a graph's weight is computed from values of its inputs, not only from their
    sizes.
    """
    weight = _weight(step, ends(step.module)[1])
    return weight is not None and any(
        node.op == "placeholder" for node in computed_from([weight], values=True)
    )


def _weight(step: StepGraph, results: Sequence[Node]) -> Node | None:
    return next(
        (
            node
            for port, node in zip(step.outputs, results, strict=True)
            if port.role is Role.WEIGHT
        ),
        None,
    )
