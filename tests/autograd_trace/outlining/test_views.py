"""Calls of a region receive what they read through views, and their bodies compute the views."""

from __future__ import annotations

import operator

import pytest
import torch
from tests.autograd_trace.outlining.layered import (
    WIDTH,
    assert_equal,
    block,
    calls,
    graph_of,
    heads,
    inputs,
    outlined,
)
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.outlining import views as taking
from trainload.autograd_trace.outlining.outline import NotOutlined
from trainload.autograd_trace.outlining.signatures import may_alias
from trainload.autograd_trace.randomness.random_key import RandomKey

aten = torch.ops.aten
LAYERS = 4


def views_of_results(module: GraphModule) -> list[Node]:
    """Return the views in the outer graph of what calls return."""
    results = [user for call in calls(module) for user in call.users]
    return [user for result in results for user in result.users if may_alias(user)]


def test_what_a_layer_keeps_is_viewed_in_the_body_that_reads_it() -> None:
    flat = graph_of(LAYERS, heads)
    module = outlined(flat)
    assert len(calls(module)) == 2 * LAYERS
    # the views outside are of the last layer's results, which the rest of the graph reads
    readers = {reader for view in views_of_results(module) for reader in view.users}
    assert readers.isdisjoint(calls(module))
    assert_equal(flat, module, inputs(LAYERS))


def test_one_of_several_views_is_taken_in_with_the_others() -> None:
    module = outlined(graph_of(LAYERS, heads))
    assert not module.graph.find_nodes(op="call_function", target=aten.unbind.int)
    bodies = [getattr(module, name) for name in ("layer_0", "layer_1")]
    for body in bodies:
        (split,) = body.graph.find_nodes(op="call_function", target=aten.unbind.int)
        assert {user.target for user in split.users} == {operator.getitem}


def test_an_operand_that_is_read_through_two_views_is_passed_once() -> None:
    module = outlined(graph_of(LAYERS, heads))
    assert calls(module)
    for call in calls(module):
        assert len(set(call.args)) == len(call.args)
    read_twice = [
        node
        for name in ("layer_0", "layer_1")
        for node in getattr(module, name).graph.find_nodes(op="placeholder")
        if len([user for user in node.users if may_alias(user)]) > 1
    ]
    assert read_twice


def test_views_that_differ_from_layer_to_layer_stay_outside() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        return block(x * weight[number], weight, bias, key, number)

    flat = graph_of(LAYERS, layer, trains=False)
    module = outlined(flat)
    assert len(calls(module)) == LAYERS
    rows = module.graph.find_nodes(op="call_function", target=aten.select.int)
    assert {node.args[2] for node in rows if node.meta["val"].ndim} == {*range(LAYERS)}
    assert_equal(flat, module, inputs(LAYERS))


def test_a_view_that_the_graph_returns_is_computed_for_it() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        turned = block(x, weight, bias, key, number).t()
        return block(turned.t(), weight, bias, key, number + 50) + turned[:WIDTH].t().flip(0)

    flat = graph_of(LAYERS, layer)
    (output,) = flat.graph.find_nodes(op="output")
    turned = flat.graph.find_nodes(op="call_function", target=aten.t.default)[-1]
    output.args = ((*output.args[0], turned),)
    module = outlined(flat)
    assert calls(module)
    assert_equal(flat, module, inputs(LAYERS))


def test_the_sites_of_a_layer_are_one_operand() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        inner = block(x, weight, bias, key, 2 * number)
        return block(inner, weight, bias, key, 2 * number + 1).sin()

    flat = graph_of(LAYERS, layer)
    module = outlined(flat)
    scalars = [
        operand
        for call in calls(module)
        for operand in call.args[2:]
        if isinstance(operand, Node) and operand.target is aten.select.int
    ]
    assert len(calls(module)) == 2 * LAYERS
    assert scalars == []
    assert_equal(flat, module, inputs(LAYERS))


def test_what_depends_on_the_memory_of_an_operand_stays_outside() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        first = weight.as_strided((WIDTH,), (1,), 0)  # of the flat tensor, whatever the weight is
        return block(x * first, weight, bias, key, number)

    flat = graph_of(LAYERS, layer, trains=False)
    module = outlined(flat)
    assert len(calls(module)) == LAYERS
    taken = module.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert len(taken) == LAYERS
    assert_equal(flat, module, inputs(LAYERS))


def test_a_region_without_operands_is_called() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        made = torch.arange(WIDTH)
        for _ in range(8):
            made = (made + 1) * 3
        return x * made

    flat = graph_of(LAYERS, layer, trains=False)
    assert_equal(flat, outlined(flat), inputs(LAYERS))


def test_a_wrong_view_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        return block(x * weight[number], weight, bias, key, number)

    monkeypatch.setattr(taking, "numbers_of", lambda node: ())
    with pytest.raises(NotOutlined, match="another expression"):
        outlined(graph_of(LAYERS, layer, trains=False))
