"""Which results of graphs that are recorded as CUDA graphs are copied."""

from __future__ import annotations

import pytest
import torch
from tests.autograd_trace.compiling.test_cuda_graphs import Repeated, recording
from torch import Tensor

from trainload.autograd_trace.graphs import Port, Role
from trainload.launching.node.built_graphs import Built, BuiltGraph
from trainload.sharding.rewriting.rewrite import Phase

ROLES = (Role.TOTALS, Role.BUFFER, Role.PREDICTION, Role.BUCKET_GRADIENT)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    """A build with a training graph and an evaluation, which both return their input for each
    role, recorded.
    """
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Repeated)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))

    def call(value: Tensor) -> list[Tensor]:
        return [value.clone() for _ in ROLES]

    inputs, outputs = (Port(Role.BATCH, "x"),), tuple(Port(role, "y") for role in ROLES)
    train, evaluation = (BuiltGraph(name, call, inputs, outputs) for name in ("train.only", "eval"))
    return Built(
        train={"train": {Phase.ONLY: train}},
        forward={"eval": evaluation},
        update={},
        update_names={},
        compiled=True,
        collectives={},
        work={},
    ).recorded()


def places(graph: BuiltGraph) -> list[set[int]]:
    """Return the addresses of each result in the last calls of many."""
    value = torch.ones(3)
    calls = [graph.call(value) for _ in range(6)][3:]
    return [{result.data_ptr() for result in results} for results in zip(*calls, strict=True)]


def test_only_gradients_stay_where_the_next_replay_writes(built: Built) -> None:
    found = dict(zip(ROLES, places(built.train["train"][Phase.ONLY]), strict=True))
    assert [role for role in ROLES if len(found[role]) == 1] == [Role.BUCKET_GRADIENT]


def test_evaluations_are_not_recorded(built: Built) -> None:
    assert built.is_recorded
    assert all(len(addresses) == 3 for addresses in places(built.forward["eval"]))
