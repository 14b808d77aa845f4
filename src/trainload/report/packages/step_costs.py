"""Costs of a training graph by module and source line: operations, values kept for backward, and
recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import TANGENT, StepGraph
from trainload.autograd_trace.recompute.rematerialisation import RECOMPUTES
from trainload.capture.operators import bodies_of
from trainload.packaging.format.source_map import modules_of, users_line
from trainload.sharding.analysis.liveness import Storages
from trainload.sharding.analysis.node_costs import Sizes, flops
from trainload.sharding.rewriting.forward_values import Forward, has_backward

Origin = tuple[str, str]
"""(module, line) that an operator comes from: "layers.0" and "model.py:12: y = self.fc(x)"; "" for
the model itself, and for an unknown line.
"""


@dataclass(slots=True)
class Cost:
    """Costs of a group of operators.

    Attributes:
        forward: multiplications and additions of matrix products in forward.
        backward: the same in backward, with what is recomputed there.
        saved: bytes of values that forward keeps for backward.
        recomputed: number of operators that backward computes again.
    """

    forward: float = 0.0
    backward: float = 0.0
    saved: int = 0
    recomputed: int = 0

    def add(self, other: Cost) -> None:
        """Add the costs of another group."""
        self.forward += other.forward
        self.backward += other.backward
        self.saved += other.saved
        self.recomputed += other.recomputed


def innermost_module(node: Node) -> str:
    """Return the path of the innermost module that has called an operator; "" for the model
    itself.
    """
    paths = modules_of(node)
    return paths[-1] if paths else ""


def costs_by_origin(step: StepGraph, sizes: Sizes) -> dict[Origin, Cost]:
    """Return the costs of each module and line of a step graph.

    Args:
        step: graph whose nodes have the stack trace and the modules of the captured operators, as
            from `sourced_step_graphs`.
        sizes: value of each symbol of its sizes.
    """
    costs: dict[Origin, Cost] = defaultdict(Cost)
    is_backward = False
    for node in step.module.graph.nodes:
        is_backward = is_backward or node.name == TANGENT
        if node.op != "call_function":
            continue
        work = _operations(step.module, node, sizes)
        cost = costs[_origin(node)]
        if is_backward:
            cost.backward += work
            cost.recomputed += RECOMPUTES in node.meta
        else:
            cost.forward += work
    if has_backward(step):
        forward, storages = Forward(step), Storages(step.module, sizes)
        for storage, span in forward.spans.items():
            if span.is_kept:
                costs[_origin(forward.nodes[span.first])].saved += storages.bytes[storage]
    return dict(costs)


def _origin(node: Node) -> Origin:
    return innermost_module(node), users_line(str(node.meta.get("stack_trace", "")))


def _operations(module: GraphModule, node: Node, sizes: Sizes) -> float:
    own = flops(node, sizes)
    inner = (
        flops(each, sizes)
        for body in bodies_of(module, node).values()
        for each in body.graph.nodes
        if each.op == "call_function"
    )
    return own or sum(inner)
