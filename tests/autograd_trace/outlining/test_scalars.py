"""Scalars of random operators are computed as vectors."""

from __future__ import annotations

import pytest
import torch
from tests.autograd_trace.outlining.layered import graph_of, inputs

from trainload.autograd_trace.outlining.scalars import stack_scalars


@pytest.mark.parametrize("layers", [2, 5])
def test_results_are_bitwise_equal(layers: int) -> None:
    flat, stacked = graph_of(layers), graph_of(layers)
    assert stack_scalars(stacked.graph)
    stacked.recompile()
    for seed in range(3):
        expected, got = (module(*inputs(layers, seed)) for module in (flat, stacked))
        assert all(map(torch.equal, expected, got))


def test_the_number_of_operators_does_not_grow_with_the_number_of_sites() -> None:
    def scalars(layers: int) -> int:
        module = graph_of(layers)
        stack_scalars(module.graph)
        hashes = module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.bitwise_xor.Tensor
        )
        return sum(node.meta["val"].ndim < 2 for node in hashes)

    assert scalars(3) == scalars(8)


def test_one_site_stays_as_it_is() -> None:
    module = graph_of(1)
    before = len(module.graph.nodes)
    assert stack_scalars(module.graph) == 0
    assert len(module.graph.nodes) == before


def test_constants_that_are_far_apart_stay_as_they_are() -> None:
    def step(key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((key + constant) & 255 for constant in (0, 1, 10_000))

    module = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="fake")(torch.tensor(3))
    assert stack_scalars(module.graph) == 0


def test_a_scalar_that_depends_on_two_constants_is_not_stacked() -> None:
    def step(key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other, third = ((key + constant) & 255 for constant in (0, 1, 2))
        return one * other, other * third

    module = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="fake")(torch.tensor(3))
    key = torch.tensor(77)
    expected = module(key)
    assert stack_scalars(module.graph) == 6
    module.recompile()
    assert all(map(torch.equal, expected, module(key)))
