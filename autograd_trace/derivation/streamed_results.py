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

Receive = Callable[[Port, Tensor], None]
"""Called once for each output, in the order in which they are computed."""


class ResultStream(Interpreter):
    """A step graph that passes each result on when it has been computed.

    A result is freed afterwards, unless the graph still reads it or the receiver keeps it.

    Args:
        step: the graph.
    """

    def __init__(self, step: StepGraph) -> None:
        graph = Graph()
        copies: dict[Node, Node] = {}
        results: Any = graph.graph_copy(step.module.graph, copies)
        graph.output(())  # the output would keep all results until the end
        super().__init__(step.module, graph=graph)
        self.step = step
        self._receive: Receive | None = None
        self._ports: dict[Node, list[Port]] = {}
        for node, port in zip(results, step.outputs, strict=True):
            self._ports.setdefault(node, []).append(port)

    def stream(self, arguments: Sequence[Tensor], receive: Receive) -> None:
        """Run the graph.

        Args:
            arguments: a tensor for each input, on the graph's device.
            receive: receives the results.
        """
        self._receive = receive
        try:
            with torch.no_grad():
                self.run(*arguments)
        finally:
            self._receive = None
            self.env.clear()

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for port in self._ports.get(n, ()):
            assert self._receive is not None
            self._receive(port, value)
        return value if n.users else None  # the interpreter keeps what it returns
