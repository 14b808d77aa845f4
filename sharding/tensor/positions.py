"""Find the positions in a graph's data: the dim beside the rows along which most of the work is
independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from trainload.autograd_trace.graphs import TANGENT, Port, Role, StepGraph
from trainload.sharding.analysis.graph_nodes import ends
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.tensor.factors import Factor
from trainload.sharding.tensor.links import Links
from trainload.sharding.tensor.special import runs_on_shares


@dataclass(frozen=True, slots=True)
class Positions:
    """A factor of the data, and how a step's work divides if ranks share it.

    Attributes:
        factor: the tokens of a sequence, for example.
        apart: operations of the matrix products that each rank does for its own positions.
        products: operations of all matrix products.
        whole: the most expensive node whose product needs all positions, or None.
    """

    factor: Factor
    apart: float
    products: float
    whole: Node | None

    @property
    def share(self) -> float:
        """Fraction of the work that is divided."""
        return self.apart / self.products


def positions_of(step: StepGraph, links: Links, ranks: int) -> Positions | None:
    """Return the positions that this number of ranks could share with the most independent work;
    None if the graph has none.
    """
    placeholders, _ = ends(step.module)
    inputs = dict(zip(placeholders, step.inputs, strict=True))
    rows = {
        f
        for n, port in inputs.items()
        if port.role is Role.BATCH
        for f in links.factors.leaves(links.dims(n)[0])
    }
    factors = [f for f in data_factors(links, inputs) if f not in rows]
    work = {node: cost for node in links.uses if (cost := flops(node)) > 0}
    nodes = list(step.module.graph.nodes)
    begin = next((index for index, node in enumerate(nodes) if node.name == TANGENT), len(nodes))
    forward = {node: work[node] for node in nodes[:begin] if node in work}
    best: Positions | None = None
    for factor in (
        f
        for f in factors
        if isinstance(f.size, int) and f.size % ranks == 0 and not links.factors.is_broken(f)
    ):
        preserved = sum(
            cost
            for node, cost in forward.items()
            if any(links.holds(dims, factor) for dims in links.outputs[node])
        )
        summed = sum(cost for node, cost in forward.items() if _sums_over(links, node, factor))
        if summed > preserved:
            # features of the data: a product sums over them, so they are not positions of its
            # result
            continue
        apart = {node: cost for node, cost in work.items() if runs_on_shares(links, node, factor)}
        whole = max(
            work.keys() - apart.keys(), key=lambda node: (work[node], node.name), default=None
        )
        candidate = Positions(factor, sum(apart.values()), sum(work.values()), whole)
        if candidate.apart > 0 and (best is None or candidate.apart > best.apart):
            best = candidate
    return best


def _sums_over(links: Links, node: Node, factor: Factor) -> bool:
    return any(
        factor in links.factors.leaves(contracted) for contracted in links.uses[node].contracted
    )


def data_factors(links: Links, inputs: Mapping[Node, Port]) -> dict[Factor, None]:
    """Return the factors of values computed from the batch only: rows, positions in a sequence,
    features of the data.
    """
    kinds = {node: port.role for node, port in inputs.items()}
    data: dict[Node, None] = {}
    other: set[Node] = set()
    for node in links.outputs:
        sources = node.all_input_nodes
        if not any(dims is not None for dims in links.outputs[node]):
            continue  # a size: a tensor made with it is not data
        if kinds.get(node) is Role.PARAMETER or any(source in other for source in sources):
            other.add(node)
        elif kinds.get(node) is Role.BATCH or any(source in data for source in sources):
            data[node] = None
    return dict.fromkeys(
        f
        for node in data
        for dims in links.outputs[node]
        for dim in dims or ()
        for f in links.factors.leaves(dim)
    )
