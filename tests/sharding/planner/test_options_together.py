"""Plans whose options all change the step graph: what holds for one of them holds for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from tests.sharding.planner.test_loss_chunks import words_job
from torch.fx import Node

import trainload
from trainload.autograd_trace.graphs import TANGENT
from trainload.packaging.package import Package
from trainload.sharding.planner.make_plan import make_plan
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.simulate import simulate
from trainload.sharding.plans.plan import Cluster
from trainload.sharding.plans.strategies import RECOMPUTES, Recompute

TWO = Cluster(devices_per_node=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    package: Package = trainload.freeze(
        words_job(layers=4), tmp_path_factory.mktemp("words") / "words.tl"
    )
    return Source(package)


def gathered(nodes: list[Node]) -> Iterator[Node]:
    """Yield gathers, and what is computed from their results without a collective or a product."""
    found: set[Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if "all_gather" in str(node.target) or (sources and found.issuperset(sources)):
            found.add(node)
            yield node


@pytest.mark.matrix("2-full-0.0", "1-selective-1.0")
@pytest.mark.parametrize(
    ("chunks", "recompute", "offload"),
    [
        *itertools.product((1, 2), RECOMPUTES, (0.0,)),
        *itertools.product((1, 2), ("job", "selective"), (1.0,)),
    ],
)
def test_no_parameter_is_kept_whole_from_forward_to_backward(
    source: Source, chunks: int, recompute: Recompute, offload: float
) -> None:
    plan = make_plan(source, TWO, "zero3", loss_chunks=chunks, recompute=recompute, offload=offload)
    graph = simulate(source, plan, training_only=True).ranks[0].ranks["train.only"].module.graph
    nodes = list(graph.nodes)
    begins = [index for index, node in enumerate(nodes) if node.name == TANGENT]
    assert len(begins) == 1
    whole = set(gathered(nodes[: begins[0]]))
    assert whole
    assert not [node for node in nodes[begins[0] :] if whole.intersection(node.all_input_nodes)]
