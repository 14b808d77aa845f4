"""Faults of a compiler, planted: what is compiled computes something else than the graph that it
was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.launch.tiny import Tiny, loss, token_rows
from tests.laws.worker import train_as_rank
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional

import trainload
from trainload.autograd_trace.recompute import hold

aten = torch.ops.aten
Change = Callable[[Graph, Node], Node]
"""Puts another node in a node's place, after it in its graph."""


class Subject(Tiny):
    """With a norm, and a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = functional.relu(self.widen(self.words(tokens)))
        logits: Tensor = self.head(self.norm(hidden) - hidden.mean(-1, keepdim=True))
        return logits


def job() -> trainload.Job:
    torch.manual_seed(0)
    batch = {"tokens": torch.from_numpy(token_rows(4))}
    return trainload.Job(
        Subject(),
        batch,
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1),
        loss=loss,
        global_batch=8,
    )


def _instead(target: Any, *more: Any) -> Change:
    """Another operator of the node's first argument and of these."""
    return lambda graph, node: graph.call_function(target, (node.args[0], *more))


def _after(target: Any, *more: Any) -> Change:
    """An operator applied to what the node gives."""
    return lambda graph, node: graph.call_function(target, (node, *more))


def _other_arguments(*places: int) -> Change:
    """The same operator of its arguments in another order."""
    return lambda graph, node: graph.create_node(
        "call_function", node.target, tuple(node.args[place] for place in places)
    )


def _without_bias(graph: Graph, node: Node) -> Node:
    return graph.call_function(aten.mm.default, node.args[1:])


FAULTS: dict[str, tuple[Any, Change]] = {
    "forward, a wrong kernel": (aten.relu.default, _instead(aten.abs.default)),
    "forward, a dropped term": (aten.addmm.default, _without_bias),
    "forward, swapped operands": (aten.sub.Tensor, _other_arguments(1, 0)),
    "forward, a wrong dim": (
        aten.mean.dim,
        lambda graph, node: graph.call_function(aten.mean.dim, (node.args[0], [0], True)),
    ),
    "backward, a gradient that is let through": (
        aten.threshold_backward.default,
        _instead(aten.clone.default),
    ),
    "backward, a factor of 1.001": (
        aten.embedding_dense_backward.default,
        _after(aten.mul.Tensor, 1.001),
    ),
    "backward, a wrong sign": (aten._log_softmax_backward_data.default, _after(aten.neg.default)),
    "update, a dropped root": (aten.sqrt.default, _instead(aten.clone.default)),
    "update, a dropped decay": (aten.mul_.Tensor, _instead(aten.mul_.Tensor, 1.0)),
    "update, a dropped weight": (aten.addcmul_.default, _other_arguments(0, 1, 2)),
}
"""What is planted, the operator that is compiled wrongly, and what stands there instead."""


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Within it this process compiles with a fault."""
    target, change = FAULTS[fault]

    def hold_back(module: torch.fx.GraphModule) -> None:
        for node in list(module.graph.nodes):
            if node.target is target:
                _put(module.graph, node, change)
        module.recompile()
        hold.hold_back(module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainload.autograd_trace.derivation.inductor.hold_back", hold_back)
        yield


def _put(graph: Graph, node: Node, change: Change) -> None:
    users = list(node.users)
    with graph.inserting_after(node):
        other = change(graph, node)
    other.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, other)
    if not node.users:
        graph.erase_node(node)


def train_with_fault(fault: str, entries: list[dict[str, Any]]) -> None:
    """What a rank of `tests.laws.runs` does, where its compiler has a fault."""
    with planted(fault):
        train_as_rank(entries)
