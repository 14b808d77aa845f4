"""Gradients of attention on GPUs are computed by deterministic algorithms, which nothing else has
to have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from trainload.autograd_trace.derivation import aot
from trainload.launching.node.determinism import deterministic
from trainload.launching.node.deterministic_attention import (
    _requiring,
    require_deterministic_attention,
)
from trainload.packaging.package import Package

GRADIENTS = (
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
)


def required() -> bool:
    """Return True if an operator without a deterministic algorithm would fail."""
    preferred = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not preferred


def test_deterministic_algorithms_are_required_of_the_operator_alone() -> None:
    with deterministic():
        assert (_requiring(required)(), required()) == (True, False)


def test_they_are_not_required_after_an_error() -> None:
    def fail() -> None:
        raise ValueError("out of memory")

    with deterministic(), pytest.raises(ValueError, match="out of memory"):
        _requiring(fail)()
    assert not required()


@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_a_gradient_is_replaced_by_an_operator_of_the_same_schema(
    gradient: Any,
) -> None:
    graph = Graph()
    inputs = [graph.placeholder(argument.name) for argument in gradient._schema.arguments]
    graph.output(graph.call_function(gradient, tuple(inputs)))
    module = GraphModule({}, graph)
    assert require_deterministic_attention(module) == 1
    (node,) = [each for each in module.graph.nodes if each.op == "call_function"]
    assert node.target.namespace == "trainload"
    assert str(node.target._schema).partition("(")[2] == str(gradient._schema).partition("(")[2]


def test_gradients_in_the_bodies_of_control_flow_are_replaced() -> None:
    inner = Graph()
    values = [inner.placeholder(each.name) for each in GRADIENTS[0]._schema.arguments]
    inner.output(inner.call_function(GRADIENTS[0], tuple(values)))
    graph = Graph()
    graph.output(graph.call_module("body", (graph.placeholder("x"),)))
    assert (
        require_deterministic_attention(GraphModule({"body": GraphModule({}, inner)}, graph)) == 1
    )


def test_graphs_without_attention_stay_as_they_are() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)))
    assert require_deterministic_attention(GraphModule({}, graph)) == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_graphs_are_derived_without_attention_of_cudnn_if_they_must_be_deterministic(
    tiny: Package, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    attention: Any = torch.backends.cuda
    enabled: list[bool] = []
    tracing = aot._trace_functional

    def trace(*args: Any, **options: Any) -> GraphModule | None:
        enabled.append(attention.cudnn_sdp_enabled())
        return tracing(*args, **options)

    monkeypatch.setattr(aot, "_trace_functional", trace)
    aot.derive(tiny.program(), "train", torch.device("cpu"), is_deterministic=wanted)
    assert enabled == [not wanted]
    assert attention.cudnn_sdp_enabled()
