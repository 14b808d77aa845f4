"""Kernels for GPUs are compiled for the sizes of the largest call."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.compiling.call_sizes import _fits, shape_environment, sized_for

x, y, read = sympy.symbols("x y read", integer=True, nonnegative=True)
LARGEST = {x: 65_535, y: 1023}


def doubled(rows: int = 4) -> GraphModule:
    """Return a graph of a tensor whose first size is symbolic."""

    def double(value: Tensor) -> Tensor:
        return value * 2

    return make_fx(double, tracing_mode="symbolic")(torch.zeros(rows, 3))


def hint(module: GraphModule) -> dict[str, int]:
    hints = shape_environment(module).backed_var_to_val
    return {str(symbol): int(value) for symbol, value in hints.items()}


def rows_of(module: GraphModule) -> str:
    return str(next(iter(module.graph.nodes)).meta["val"].shape[0])


@pytest.mark.parametrize(("rows", "expected"), [(48, 48), (1, 2)])
def test_hints_are_the_sizes_of_the_largest_call(rows: int, expected: int) -> None:
    module = doubled()
    with sized_for(module, {rows_of(module): rows}):
        assert hint(module)[rows_of(module)] == expected


def test_hints_are_those_of_the_example_afterwards() -> None:
    module = doubled()
    with sized_for(module, {rows_of(module): 48}):
        pass
    assert hint(module)[rows_of(module)] == 4


def test_other_symbols_keep_their_hints() -> None:
    module = doubled()
    with sized_for(module, {"another": 48}):
        assert hint(module)[rows_of(module)] == 4


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        (x * 1024 + y, True),
        (x * 65_536 + y, False),
        (y * 2_654_435_769, False),
        (sympy.Integer(2_654_435_769), False),
        (-x * 65_536, False),
        (read * 50_304 + y, True),
    ],
    ids=str,
)
def test_a_value_that_needs_more_than_32_bits_is_found(expression: sympy.Expr, fits: bool) -> None:
    assert _fits(expression, LARGEST) is fits
