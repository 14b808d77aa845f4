"""Calls of a region receive one slice of a bucket, and return one part of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.autograd_trace.outlining.layered import (
    WIDTH,
    assert_equal,
    block,
    calls,
    graph_of,
    inputs,
    outlined,
)
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.outlining import fold as folding
from trainload.autograd_trace.outlining.equality import differing_output
from trainload.autograd_trace.outlining.outline import NotOutlined
from trainload.autograd_trace.randomness.random_key import RandomKey

aten = torch.ops.aten
LAYERS = 4
SIZE = WIDTH * WIDTH + WIDTH
"""Parameters of a layer."""


def slices(module: GraphModule) -> list[tuple[int, int]]:
    """Return start and end of the parts of the flat parameters that the outer graph takes."""
    flat = module.graph.find_nodes(op="placeholder")[0]
    return [user.args[2:4] for user in flat.users if user.target is aten.slice.Tensor]


def test_the_parameters_of_a_layer_are_one_operand() -> None:
    module = outlined(graph_of(LAYERS, trains=False))
    layers = [(start, start + SIZE) for start in range(WIDTH, WIDTH + LAYERS * SIZE, SIZE)]
    assert slices(module) == [(0, WIDTH), *layers]


def test_the_gradients_of_a_layer_are_one_result() -> None:
    module = outlined(graph_of(LAYERS))
    (collected,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    entries: Any = collected.args[0]
    assert [entry.meta["val"].numel() for entry in entries] == [WIDTH, *[SIZE] * LAYERS]


def of_buckets(take: Any) -> GraphModule:
    """Trace layers whose weights are in one flat tensor and whose biases are in another.

    `take(weights, biases, number)` returns the weight and the bias of a layer.
    """

    def step(weights: Tensor, biases: Tensor, batch: Tensor, key: Tensor) -> Sequence[Tensor]:
        x, random = batch, RandomKey(key, torch.zeros((), dtype=torch.int64), len(batch))
        for number in range(LAYERS):
            weight, bias = take(weights, biases, number)
            x = block(x, weight, bias, random, number)
        return [x]

    module: GraphModule = make_fx(step, tracing_mode="fake")(*bucket_inputs())
    module.graph.eliminate_dead_code()
    return module


def bucket_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2 * LAYERS * WIDTH * WIDTH, generator=generator)
    biases = torch.randn(2 * LAYERS * WIDTH, generator=generator)
    return [weights, biases, torch.randn(4, WIDTH, generator=generator), torch.tensor(7)]


def two(weights: Tensor, biases: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the sum of two weights of a layer, and the sum of its biases."""
    size = WIDTH * WIDTH
    first, second = (
        weights[start : start + size].view(WIDTH, WIDTH)
        for start in (2 * number * size, (2 * number + 1) * size)
    )
    low, high = (
        biases[start : start + WIDTH] for start in (number * WIDTH, (LAYERS + number) * WIDTH)
    )
    return first + second.t(), low + high


def irregular(weights: Tensor, biases: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the same of weights whose distance differs from layer to layer."""
    size = WIDTH * WIDTH
    first, second = (
        weights[start : start + size].view(WIDTH, WIDTH)
        for start in (number * size, (2 * LAYERS - 1 - number) * size)
    )
    return first + second, biases[number * WIDTH : (number + 1) * WIDTH]


def test_each_bucket_has_an_operand() -> None:
    flat = of_buckets(two)
    module = outlined(flat)
    biases = module.graph.find_nodes(op="placeholder")[1]
    size = WIDTH * WIDTH
    assert slices(module) == [(2 * n * size, 2 * (n + 1) * size) for n in range(LAYERS)]
    # what is between two biases of a layer belongs to others, and is passed too
    assert [user.args[2:4] for user in biases.users] == [
        (n * WIDTH, (LAYERS + n + 1) * WIDTH) for n in range(LAYERS)
    ]
    assert_equal(flat, module, bucket_inputs())


def test_parameters_at_other_distances_stay_apart() -> None:
    flat = of_buckets(irregular)
    module = outlined(flat)
    assert len(calls(module)) == LAYERS
    assert len(slices(module)) == 2 * LAYERS
    assert_equal(flat, module, bucket_inputs())


def test_rows_that_the_model_collects_stay_apart() -> None:
    def step(weights: Tensor, biases: Tensor, batch: Tensor, key: Tensor) -> Sequence[Tensor]:
        x, rows = batch, list[Tensor]()
        random = RandomKey(key, torch.zeros((), dtype=torch.int64), len(batch))
        for number in range(LAYERS):
            weight, bias = two(weights, biases, number)
            x = block(x, weight, bias, random, number)
            rows += [torch.tanh(x), torch.sin(x)]
        return [torch.cat(rows), torch.cat([each.flatten() for each in rows[::2]])]

    flat: GraphModule = make_fx(step, tracing_mode="fake")(*bucket_inputs())
    module = outlined(flat)
    assert len(calls(module)) == LAYERS
    assert_equal(flat, module, bucket_inputs())


def test_a_slice_at_a_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    slicing = folding._slice_in_body

    def swapped(body: Any, hull: Node, low: int, inputs: Any) -> None:
        starts = [piece.start for _, piece in inputs]
        pairs = zip(inputs, reversed(starts), strict=True)
        slicing(body, hull, low, [(node, replace(piece, start=n)) for (node, piece), n in pairs])

    monkeypatch.setattr(folding, "_slice_in_body", swapped)
    with pytest.raises(NotOutlined, match="another expression"):
        outlined(of_buckets(two))


def test_gradients_in_a_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    joining = folding._join
    monkeypatch.setattr(folding, "_join", lambda body, results: joining(body, list(results)[::-1]))
    with pytest.raises(NotOutlined, match="another expression"):
        outlined(graph_of(LAYERS))


def traced(function: Any) -> GraphModule:
    module: GraphModule = make_fx(function, tracing_mode="fake")(torch.zeros(12), torch.zeros(3))
    return module


EQUAL = {
    "a part of a part": (lambda x, y: [x[2:10][1:4]], lambda x, y: [x[3:6]]),
    "an element of a part": (lambda x, y: [x[2:10][1]], lambda x, y: [x[3]]),
    "a collection of collections": (
        lambda x, y: [torch.cat([y, torch.cat([x, y]), x])],
        lambda x, y: [torch.cat([y, x, y, x])],
    ),
}
DIFFERENT = {
    "parts of one length": (lambda x, y: [x[2:10][1:4]], lambda x, y: [x[2:5]]),
    "parts of one start": (lambda x, y: [x[2:10][1:4]], lambda x, y: [x[3:7]]),
    "elements of a part": (lambda x, y: [x[2:10][2]], lambda x, y: [x[3]]),
    "an element and a part of one": (lambda x, y: [x[3:4].sum()], lambda x, y: [x[3].sum()]),
    "parts of others": (lambda x, y: [x[0:2]], lambda x, y: [y[0:2]]),
    "steps": (lambda x, y: [x[0:6:2]], lambda x, y: [x[0:3]]),
    "the order of a collection": (
        lambda x, y: [torch.cat([y, torch.cat([x, y])])],
        lambda x, y: [torch.cat([x, y, y])],
    ),
    "a collection of rows": (
        lambda x, y: [torch.cat([x.view(3, 4), y.view(3, 1)], 1).flatten()],
        lambda x, y: [torch.cat([x, y])],
    ),
}


@pytest.mark.parametrize("case", EQUAL)
def test_parts_and_collections_are_compared_by_what_they_are(case: str) -> None:
    one, other = map(traced, EQUAL[case])
    assert differing_output(one, other) is None


@pytest.mark.parametrize("case", DIFFERENT)
def test_other_parts_and_collections_differ(case: str) -> None:
    one, other = map(traced, DIFFERENT[case])
    assert differing_output(one, other) == 0


def test_results_are_bitwise_equal() -> None:
    flat = graph_of(LAYERS)
    module = outlined(flat)
    assert_equal(flat, module, inputs(LAYERS))
