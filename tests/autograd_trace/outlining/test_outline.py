"""Repeated layers become calls of one body, and no result changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Set
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.autograd_trace.outlining.layered import (
    WIDTH,
    Layer,
    assert_equal,
    block,
    calls,
    graph_of,
    heads,
    inputs,
)
from torch import Tensor
from torch.fx import GraphModule, Node

from trainload.autograd_trace.graphs import ADDED
from trainload.autograd_trace.outlining import find_regions as matching
from trainload.autograd_trace.outlining import outline as outlining
from trainload.autograd_trace.outlining.body import Body, make_body
from trainload.autograd_trace.outlining.equality import CALL
from trainload.autograd_trace.outlining.find_regions import Region
from trainload.autograd_trace.outlining.outline import NotOutlined, OutlinedRegion, outline
from trainload.autograd_trace.outlining.scalars import stack_scalars
from trainload.autograd_trace.outlining.signatures import describe, operands_of
from trainload.autograd_trace.randomness.random_key import RandomKey


def prepared(module: GraphModule) -> GraphModule:
    """Stack the random sites."""
    stack_scalars(module.graph)
    module.recompile()
    return module


def assert_equal_twice(flat: GraphModule, outlined: GraphModule, layers: int) -> None:
    for seed in range(2):
        assert_equal(flat, outlined, inputs(layers, seed))


@pytest.mark.parametrize("layers", [2, 3, 7])
def test_forward_and_backward_are_regions_of_every_layer(layers: int) -> None:
    regions = outline(prepared(graph_of(layers))).regions
    assert [region.calls for region in regions] == [layers, layers]


def test_results_are_bitwise_equal() -> None:
    module = prepared(graph_of(5))
    outlined = outline(module)
    assert outlined.regions
    assert_equal_twice(module, outlined.module, 5)


def test_the_operators_that_a_compiler_sees_hardly_grow_with_depth() -> None:
    few, many = (prepared(graph_of(layers)) for layers in (4, 16))
    growth = outline(many).nodes - outline(few).nodes
    flat_growth = len(many.graph.nodes) - len(few.graph.nodes)
    assert growth < flat_growth / 3


def test_a_graph_without_repetition_is_returned_as_it_is() -> None:
    module = graph_of(1, trains=False)
    outlined = outline(module)
    assert outlined.module is module
    assert outlined.regions == ()


def test_repeated_layers_of_a_graph_that_writes_in_place_stay_flat() -> None:
    module = prepared(graph_of(3))
    batch = module.graph.find_nodes(op="placeholder")[1]
    with module.graph.inserting_before(module.graph.output_node()):
        written = module.graph.call_function(torch.ops.aten.add_.Tensor, (batch, 1))
    written.meta["val"] = batch.meta["val"]
    with pytest.raises(NotOutlined, match="add_"):
        outline(module)


def test_what_a_plan_has_added_is_in_no_region() -> None:
    module = prepared(graph_of(4))
    outlined = outline(module).module
    bodies = [child for child in outlined.children() if isinstance(child, GraphModule)]
    assert bodies
    assert not any(ADDED in node.meta for body in bodies for node in body.graph.nodes)


def test_no_result_of_a_region_shares_memory_with_another_or_with_an_operand() -> None:
    module = prepared(graph_of(3))
    outlined = outline(module).module
    arguments = inputs(3)
    memory: list[set[int]] = []

    class Watch(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            results = super().call_function(target, args, kwargs)
            if target is CALL:
                operands = {
                    x.untyped_storage().data_ptr() for x in args[2:] if isinstance(x, Tensor)
                }
                own = [x.untyped_storage().data_ptr() for x in results]
                assert len(set(own)) == len(own)
                assert not operands & set(own)
                memory.append(operands)
            return results

    Watch(outlined).run(*arguments)
    assert len(memory) >= 4


def odd(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
    """A block with a number of its own."""
    return block(x, weight, bias, key, number) * (1 + number / 8)


def short(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
    """A layer that is not like a block."""
    return torch.tanh(x @ weight) + bias


def skipping(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
    """Two blocks with the same parameters, and a connection around both."""
    inner = block(x, weight, bias, key, number)
    return block(inner, weight.t(), bias, key, number + 100) + x.flip(0)


LAYERS: list[Layer] = [block, odd, short, skipping, heads]


@settings(max_examples=15, deadline=None)
@given(kinds=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=7), trains=st.booleans())
def test_any_stack_of_layers_has_bitwise_equal_results(kinds: list[Layer], trains: bool) -> None:
    module = prepared(graph_of(len(kinds), kinds, trains=trains))
    assert_equal_twice(module, outline(module).module, len(kinds))


def test_layers_with_different_numbers_stay_apart() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        return torch.nn.functional.leaky_relu(block(x, weight, bias, key, 0), number / 10)

    module = prepared(graph_of(4, layer))
    assert_equal_twice(module, outline(module).module, 4)


def test_a_value_from_outside_that_depends_on_a_layer_splits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        middle = block(x, weight, bias, key, number)
        return block(middle * (2.0 + number), weight, bias, key, number + 50)

    module = prepared(graph_of(4, layer, trains=False))
    outlined = outline(module)
    assert [region.calls for region in outlined.regions] == [4, 4]
    assert_equal_twice(module, outlined.module, 4)


def swap_operands(region: Region, masks: Set[Node]) -> Body:
    """Exchange two operands of equal shape in the second occurrence."""
    body = make_body(region, masks)
    kinds = [str(operand[0].meta["val"]) for operand in body.operands]
    first, second = next(
        (i, j)
        for i, j in itertools.combinations(range(len(kinds)), 2)
        if kinds[i] == kinds[j] and body.operands[i][1] is not body.operands[j][1]
    )
    operands = [list(operand) for operand in body.operands]
    operands[first][1], operands[second][1] = operands[second][1], operands[first][1]
    return dataclasses.replace(body, operands=tuple(map(tuple, operands)))


def swap_results(region: Region, masks: Set[Node]) -> Body:
    """Exchange two results of equal shape."""
    body = make_body(region, masks)
    nodes = region.occurrences[0]
    kinds = [describe(nodes[position].meta["val"]) for position in body.results]
    results = list(body.results)
    for first, second in itertools.combinations(range(len(kinds)), 2):
        if kinds[first] == kinds[second]:
            results[first], results[second] = results[second], results[first]
            break
    return dataclasses.replace(body, results=tuple(results))


@pytest.mark.parametrize("broken", [swap_operands, swap_results])
def test_a_wrong_body_is_noticed(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlining, "make_body", broken)
    with pytest.raises(NotOutlined, match="another expression"):
        outline(prepared(graph_of(4)))


def test_a_region_that_is_not_the_same_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor, key: RandomKey, number: int) -> Tensor:
        return torch.nn.functional.leaky_relu(block(x, weight, bias, key, 0), number / 10)

    monkeypatch.setattr(matching, "numbers_of", lambda node: ())
    with pytest.raises(NotOutlined, match="another expression"):
        outline(prepared(graph_of(4, layer)))


def test_a_region_lists_its_size_and_its_calls() -> None:
    regions = outline(prepared(graph_of(3, trains=False))).regions
    assert regions == (OutlinedRegion(nodes=regions[0].nodes, calls=3),)
    assert regions[0].nodes > 2 * WIDTH


def test_every_call_has_an_identifier_of_its_body() -> None:
    outlined = outline(prepared(graph_of(3))).module
    found = calls(outlined)
    assert {str(node.args[0]) for node in found} == {str(node.args[1]) for node in found}


def test_masks_go_from_forward_to_backward_as_bytes() -> None:
    outlined = outline(prepared(graph_of(3))).module
    for call in calls(outlined):
        values = [operand.meta["val"] for operand in operands_of(call)[1:]] + list(call.meta["val"])
        assert torch.bool not in {value.dtype for value in values if isinstance(value, Tensor)}
        assert torch.uint8 in {value.dtype for value in values if isinstance(value, Tensor)}
