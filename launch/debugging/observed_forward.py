"""Collect statistics of a step's activations: before each call of a training graph, its forward is
computed on the same arguments, so that the call itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from trainload.launching.debugging.activation_sums import Observed, Site, Sums, sites_of, sums_of
from trainload.launching.debugging.node_origins import backward_begins
from trainload.launching.node.built_graphs import Built, BuiltGraph, Call
from trainload.sharding.analysis.graph_nodes import computed_from
from trainload.sharding.pipeline.stages import Part


class ObservedForwards:
    """The forward parts of a rank's training graphs, as far as statistics need them.

    Ranks that call the same graphs have the same sites in the same order.

    Args:
        interpreted: interpreted build whose graphs know their source lines (`uncompiled_build`).
        follows_units: True to follow which units are zero in every row of a step.

    Attributes:
        sums: captured graph -> sums of its calls, by site.
    """

    def __init__(self, interpreted: Built, *, follows_units: bool = False) -> None:
        graphs = [
            (name, graph)
            for name, by_phase in interpreted.train.items()
            for graph in by_phase.values()
        ] + [
            (name, graph)
            for name, stages in interpreted.stages.items()
            for (_, part), graph in stages.parts.items()
            if part is Part.FORWARD
        ]
        self._forwards = {
            graph.name: (name, _Forward(graph, follows_units=follows_units))
            for name, graph in graphs
        }
        self.sums: dict[str, dict[Site, Sums]] = {}

    def observing(self, built: Built, on_call: Callable[[str], None]) -> Built:
        """Return a build of the same plan whose calls of training graphs are observed.

        Args:
            built: the build.
            on_call: called with the name of a graph when its own call begins.
        """

        def call_of(graph: BuiltGraph) -> Call:
            if graph.name not in self._forwards:
                return graph.call
            name, forward = self._forwards[graph.name]

            def call(*arguments: Tensor) -> Sequence[Tensor]:
                totals = self.sums.setdefault(name, {})
                for site, sums in forward.sums(arguments):
                    if site in totals:
                        totals[site].add(sums)
                    else:
                        totals[site] = sums
                on_call(graph.name)
                return graph.call(*arguments)

            return call

        return built.replaced(call_of)


class _Sites(nn.Module):
    """Computation of the sums over one value, as a part of a graph module."""

    def __init__(self, observed: Sequence[Observed], *, follows_units: bool) -> None:
        super().__init__()
        self._observed, self._follows_units = observed, follows_units

    def forward(self, value: Tensor) -> list[tuple[Site, Sums]]:
        return sums_of(value, self._observed, follows_units=self._follows_units)


class _Forward:
    """The part of a graph that the values of its sites are computed from, as generated code: an
    interpreter takes as long for an operator as small operators take.
    """

    def __init__(self, graph: BuiltGraph, *, follows_units: bool) -> None:
        module: Any = graph.call
        assert isinstance(module, GraphModule), "the build is interpreted"
        nodes = list(module.graph.nodes)
        sites = sites_of(nodes[: backward_begins(module, graph.inputs)])
        needed = computed_from(sites)
        owner, part = nn.Module(), Graph()
        copies: dict[Node, Node] = {}
        sums: list[Node] = []
        for node in nodes:
            if node.op != "placeholder" and node not in needed:
                continue
            copies[node] = part.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                name = str(node.target)
                setattr(owner, name, getattr(module, name))
            if node in sites:
                name = f"sites_{len(sums)}"
                observed = [Observed.of(site, node) for site in sites[node]]
                setattr(owner, name, _Sites(observed, follows_units=follows_units))
                sums.append(part.call_module(name, (copies[node],)))
        part.output(tuple(sums))
        self._module = GraphModule(owner, part)

    def sums(self, arguments: Sequence[Tensor]) -> list[tuple[Site, Sums]]:
        """Return the sums of a call with these arguments, by site."""
        with torch.no_grad():
            return [each for of_value in self._module(*arguments) for each in of_value]
