"""Operands of operators with bodies share no memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from trainload.autograd_trace.compiling.operands import keep_operands_apart

aten, cond = torch.ops.aten, torch.ops.higher_order.cond


def added(graph: Graph, target: Callable[..., Any], *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def body(function: str) -> GraphModule:
    graph = Graph()
    first, second = graph.placeholder("a"), graph.placeholder("b")
    graph.output((graph.call_function(getattr(torch, function), (first, second)),))
    return GraphModule(nn.Module(), graph)


def choosing() -> GraphModule:
    """Build a graph: pred, flat (8,) -> the sum or the product of the halves of `flat`."""
    graph, owner = Graph(), nn.Module()
    pred, flat = graph.placeholder("pred"), graph.placeholder("flat")
    owner.add_module("one", body("add"))
    owner.add_module("other", body("mul"))
    with FakeTensorMode():
        pred.meta["val"], flat.meta["val"] = torch.ones((), dtype=torch.bool), torch.ones(8)
        split = added(graph, aten.split_with_sizes.default, flat, [4, 4])
        halves = [graph.call_function(operator.getitem, (split, place)) for place in range(2)]
        for place, half in enumerate(halves):
            half.meta["val"] = split.meta["val"][place]
        views = [added(graph, aten.view.default, half, [2, 2]) for half in halves]
    result = graph.call_function(
        cond, (pred, graph.get_attr("one"), graph.get_attr("other"), tuple(views))
    )
    graph.output((graph.call_function(operator.getitem, (result, 0)),))
    return GraphModule(owner, graph)


def test_the_second_view_of_a_buffer_is_copied() -> None:
    module = choosing()
    keep_operands_apart(module)
    (call,) = module.graph.find_nodes(op="call_function", target=cond)
    assert [operand.target for operand in call.args[-1]] == [aten.view.default, aten.clone.default]


def test_no_value_changes() -> None:
    module, flat = choosing(), torch.arange(8.0)
    keep_operands_apart(module)
    found: list[Tensor] = [module(torch.tensor(pred), flat)[0] for pred in (True, False)]
    one, other = flat.view(2, 2, 2)
    assert torch.equal(found[0], one + other)
    assert torch.equal(found[1], one * other)
