"""Injected compiler faults: the compiled code differs from the graph."""

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
"""Function that inserts a replacement of a node after it in its graph, and returns it."""


class Subject(Tiny):
    """The tiny model with a layer norm and a subtraction."""

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
    """Return a change to another operator on the node's first argument and `more`."""
    return lambda graph, node: graph.call_function(target, (node.args[0], *more))


def _after(target: Any, *more: Any) -> Change:
    """Return a change that applies an operator to the node's result."""
    return lambda graph, node: graph.call_function(target, (node, *more))


def _other_arguments(*places: int) -> Change:
    """Return a change to the same operator with its arguments at `places`."""
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
"""Description of a fault -> the operator that is miscompiled, and its replacement."""


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Compile with a fault in this process within the block."""
    target, change = FAULTS[fault]

    def hold_back(module: torch.fx.GraphModule) -> None:
        for node in list(module.graph.nodes):
            if node.target is target:
                _put(module.graph, node, change)
        module.recompile()
        hold.hold_back(module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainload.autograd_trace.compiling.inductor.hold_back", hold_back)
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
    """Train as a rank of `tests.laws.runs`, with a faulty compiler."""
    with planted(fault):
        train_as_rank(entries)
