"""Microbatches whose weight is 0 (every label is ignored, say) add nothing to an update, whatever their loss and gradients are.

The mean over nothing is NaN, and so is its gradient: 0 times either is NaN again, and would reach the other ranks and microbatches.
"""

from __future__ import annotations

from torch import Tensor, ops
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.graphs import TANGENT, Role, StepGraph
from trainload.sharding.nodes import append, ends, mode_of

aten = ops.aten
_MEANS = (Role.LOSS, Role.METRIC)


def ignore_zero_weight(step: StepGraph) -> StepGraph:
    """Return the same step graph with loss, metrics and gradients of 0 where the weight is 0.

    A graph without a loss, or one that is weighed by its rows, is returned as it is.

    Args:
        step: a step graph, as one rank of the tensor axis has it.
    """
    weight = _weight(step)
    if weight is None or not _reads_values(weight):
        return step
    placeholders, results = ends(step.module)
    mode, nodes = mode_of(placeholders), list(step.module.graph.nodes)
    begin = next((place for place, node in enumerate(nodes) if node.name == TANGENT), len(nodes) - 1)
    means = [node for port, node in zip(step.outputs, results, strict=True) if port.role in _MEANS]
    gradients = {node for port, node in zip(step.outputs, results, strict=True) if port.role is Role.GRADIENT}
    early = [node for node in nodes[:begin] if node in gradients]
    graph = Graph()
    copied: dict[Node, Node] = {}
    masked: dict[Node, Node] = {}

    def mask(node: Node) -> None:
        masked[node] = append(graph, mode, aten.masked_fill.Scalar, copied[node], nothing, 0)

    for place, node in enumerate(nodes):
        if place == begin:  # what forward puts out is computed in forward
            nothing = append(graph, mode, aten.eq.Scalar, copied[weight], 0)
            for mean in dict.fromkeys(means):
                mask(mean)
        if node.op == "output":
            own = (*_MEANS, Role.GRADIENT)
            ports = zip(step.outputs, results, strict=True)
            output = graph.output(tuple(masked[value] if port.role in own else copied[value] for port, value in ports))
            output.meta["val"] = node.meta.get("val")
            break
        copied[node] = graph.node_copy(node, lambda source: copied[source])
        for gradient in early if place == begin else [node] if place > begin and node in gradients else []:
            mask(gradient)
    return StepGraph(GraphModule(step.module, graph), step.inputs, step.outputs)


def _weight(step: StepGraph) -> Node | None:
    _, results = ends(step.module)
    return next((node for port, node in zip(step.outputs, results, strict=True) if port.role is Role.WEIGHT), None)


def _reads_values(node: Node) -> bool:
    """Return whether a tensor is computed from values of the graph's inputs, not from their sizes alone."""
    stack, seen = [node], {node}
    while stack:
        here = stack.pop()
        if here.op == "placeholder":
            return True
        fresh = [
            source for source in here.all_input_nodes if source not in seen and isinstance(source.meta.get("val"), Tensor | tuple | list)
        ]
        seen.update(fresh)
        stack += fresh
    return False
