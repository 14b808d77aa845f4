"""Run a step graph without holding all of its results: the gradients of a model take as much memory
as its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node

from trainload.autograd_trace.graphs import Port, StepGraph
from trainload.core.host_memory import return_free_memory


def stream_results(
    step: StepGraph, arguments: Sequence[Tensor], receive: Callable[[Port, Tensor], None]
) -> None:
    """Run a step graph, and pass each result to `receive` when it has been computed.

    A result is freed afterwards, unless the graph still reads it or `receive` keeps it.

    Args:
        step: the graph, for the device of the arguments.
        arguments: a tensor for each input.
        receive: called once for each output, in the order in which they are computed.
    """
    with torch.no_grad():
        _Stream(step, receive).run(*arguments)
    return_free_memory()


class _Stream(Interpreter):
    def __init__(self, step: StepGraph, receive: Callable[[Port, Tensor], None]) -> None:
        graph = Graph()
        copies: dict[Node, Node] = {}
        results: Any = graph.graph_copy(step.module.graph, copies)
        graph.output(())  # the output would keep all results until the end
        super().__init__(step.module, graph=graph)
        self._receive = receive
        self._ports: dict[Node, list[Port]] = {}
        for node, port in zip(results, step.outputs, strict=True):
            self._ports.setdefault(node, []).append(port)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for port in self._ports.get(n, ()):
            self._receive(port, value)
        return value if n.users else None  # the interpreter keeps what it returns
