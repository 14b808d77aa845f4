"""Bisection finds the operator at which a compiled graph diverges, wherever it is in the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch.planted import job
from tests.sharding.given import captured_step, value
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.launching.verification import departures
from trainload.launching.verification.departures import Values, departing, recorded

FAULT = "fault"


class Faulty:
    """Compiler that multiplies the results of marked nodes by -1.5.

    Like torch's, its compiled functions only accept tensors and numbers.
    """

    def __init__(self, folder: Path) -> None:
        pass

    def __call__(self, module: GraphModule) -> Callable[..., Any]:
        for node in [node for node in module.graph.nodes if FAULT in node.meta]:
            with module.graph.inserting_after(node):
                wrong = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, -1.5))
            node.replace_all_uses_with(
                wrong, delete_user_cb=lambda user, wrong=wrong: user is not wrong
            )
        module.recompile()

        def call(*given: Any) -> Any:
            if not all(isinstance(each, Tensor | int | float) for each in given):
                raise TypeError("an input that is no tensor")
            return module(*given)

        return call


@pytest.fixture(scope="module")
def graph() -> tuple[GraphModule, Values]:
    given = job()
    program, step = captured_step(given)
    state = dict(program.state)
    arguments = [value(port, given, state, program.constants) for port in step.inputs]
    return step.module, recorded(step.module, arguments)


def is_float(found: Any) -> bool:
    return isinstance(found, Tensor) and found.is_floating_point() and bool(found.count_nonzero())


@pytest.mark.slow  # test_verifying.py has one fault
def test_a_fault_is_found_at_each_operator_of_a_graph(
    graph: tuple[GraphModule, Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "_Compiling", Faulty)
    module, values = graph
    tried: list[Node] = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and is_float(values[node]) and node.users
    ]
    assert len(tried) > 30
    for node in tried:
        node.meta[FAULT] = True
        found = departing(module, values)
        del node.meta[FAULT]
        assert found == [node.args[0] if node.target is operator.getitem else node]
