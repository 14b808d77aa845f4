"""How far rounding alone moves a graph's values: what a compiled graph may differ by from the interpreted one.

A compiler sums in another order, fuses multiplications with additions, and keeps low-precision values in registers of more digits. How far
that moves a result depends on the graph and on its inputs: a bias before a BatchNorm has a gradient of rounding errors alone, and a
comparison may go the other way. So the graph itself is asked, by running it with every result moved by a last place at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from trainload.sharding.collectives import is_collective

RUNS = 2
"""So many runs are made; the further one counts."""
FACTOR = 10.0
"""A compiled graph may be so many times as far away: a sum of many terms rounds more than once."""
EXPLAINED = 1e-5
"""A relative distance that float32 explains in any graph: no run is made for less."""


class Rounding(Interpreter):
    """Runs a graph with each floating-point result moved by a unit in its last place, up, down or not at all, element by element.

    Results that share memory with an input are left alone: they are views, or are written in place. So are those of collectives, which are
    there only when they have been waited for.

    Args:
        module: the graph.
        seed: of the moves.

    Example:
        Rounding(graph, 0).run(*arguments)
    """

    def __init__(self, module: GraphModule, seed: int) -> None:
        super().__init__(module)
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def run_node(self, node: Node) -> Any:
        """Run a node, and move what it gives."""
        value = super().run_node(node)
        if node.op != "call_function" or is_collective(node):
            return value
        shared = {_storage(source) for source in self._inputs_of(node)} - {None}
        return map_aggregate(value, lambda each: self._moved(each, shared))

    def _inputs_of(self, node: Node) -> list[Any]:
        return [self.env.get(source) for source in node.all_input_nodes]

    def _moved(self, value: Any, shared: set[int | None]) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or _storage(value) in shared:
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        steps = torch.randint(-1, 2, value.shape, generator=self._generators[value.device], device=value.device)
        return value * (1 + torch.finfo(value.dtype).eps * steps).to(value.dtype)


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def moved_runs(module: GraphModule, given: Callable[[], Sequence[Tensor]]) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Return (arguments, results) of each run. given: makes the arguments of a run, which may be written in place."""
    found = []
    for seed in range(RUNS):
        arguments = given()
        with torch.no_grad():
            found.append((arguments, Rounding(module, seed).run(*arguments)))
    return found
