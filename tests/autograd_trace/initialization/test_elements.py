"""First values at some elements, and whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.initialization import elements
from trainload.autograd_trace.initialization.elements import (
    BLOCK,
    Elements,
    is_elementwise,
    whole_bytes,
)
from trainload.capture.initialization.initial_graphs import output_of

ROWS, COLUMNS = 300, 257  # three blocks
Function = Callable[[Tensor], Tensor]


def padded(x: Tensor) -> Tensor:
    return torch.select_scatter(x, torch.zeros_like(x[0]), 0, 7)


def partly(x: Tensor) -> Tensor:
    return torch.slice_scatter(x * 2.0, x[10:20], 0, 100, 120, 2)


ELEMENTWISE: dict[str, Function] = {
    "same": lambda x: x,
    "scaled": lambda x: x * 0.02 + 1.0,
    "erfinv": lambda x: (x * 0.9).clamp(-0.99, 0.99).erfinv(),
    "transposed": lambda x: x.t() * 2.0,
    "permuted": lambda x: x.view(ROWS, 1, COLUMNS).permute(2, 0, 1) + 1.0,
    "broadcast": lambda x: x[3] + x[:, 5:6],
    "padded row": padded,
    "steps": partly,
    "column": lambda x: x[:, 4],
    "expanded": lambda x: x[:, :1].expand(ROWS, 5),
    "reshaped": lambda x: x.reshape(-1, 100).transpose(0, 1),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "where": lambda x: torch.where(x > 0, x, -x),
    "single": lambda x: x[0, 0] * 3.0,
    "copied": lambda x: torch.ops.aten.copy.default(torch.empty(ROWS, 3), x[:, :1]),
}
WHOLE: dict[str, Function] = {
    "row norm": lambda x: x / x.norm(dim=1, keepdim=True),
    "orthogonal": lambda x: torch.linalg.qr(x[:20, :20])[0],
    "cumulative": lambda x: x.cumsum(0),
    "sorted": lambda x: x.sort(0).values,
    "indexed": lambda x: x[torch.arange(10)],
}


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    """Return the graph of a function, with a list of one output."""
    module: GraphModule = make_fx(lambda *values: (function(*values),), tracing_mode="fake")(
        *inputs
    )
    return module


def module_of(function: Function) -> GraphModule:
    return traced(function, torch.empty(ROWS, COLUMNS))


def values() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def elements_of(module: GraphModule) -> Elements:
    return Elements(module, [values().reshape(-1).__getitem__])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operators_with_rules_are_computed_element_by_element(name: str) -> None:
    module = module_of(ELEMENTWISE[name])
    assert is_elementwise(module)
    assert whole_bytes(module) == 0


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_computed_whole(name: str) -> None:
    module = module_of(WHOLE[name])
    assert not is_elementwise(module)
    assert whole_bytes(module) > 0


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_the_values_are_those_of_the_function(name: str) -> None:
    function = {**ELEMENTWISE, **WHOLE}[name]
    expected = function(values())
    found = elements_of(module_of(function)).slice(0, expected.numel())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected.reshape(-1), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
@settings(max_examples=10)
@given(data=st.data())
def test_a_part_has_the_bits_of_the_whole(name: str, data: st.DataObject) -> None:
    module = module_of({**ELEMENTWISE, **WHOLE}[name])
    size = output_of(module).meta["val"].numel()
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = elements_of(module).slice(0, size)
    assert torch.equal(elements_of(module).slice(start, stop), whole[start:stop])


def test_a_table_without_draws_is_computed_by_the_same_calls() -> None:
    def table() -> Tensor:
        return 1.0 / 10000.0 ** (torch.arange(0, 2 * BLOCK + 6, 2) / 64)

    module = traced(table)
    assert torch.equal(Elements(module, []).slice(0, BLOCK + 3), table())


def test_a_large_constant_is_computed_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    module = traced(lambda: torch.full((BLOCK, 2), 0.5))
    assert not is_elementwise(module)
    monkeypatch.setattr(elements, "_TABLE", 1000)
    assert is_elementwise(module)
    assert torch.equal(Elements(module, []).slice(5, 9), torch.full((4,), 0.5))


def test_whole_tensors_are_computed_with_one_thread() -> None:
    threads = torch.get_num_threads()
    used: list[int] = []

    def read(index: Tensor) -> Tensor:
        used.append(torch.get_num_threads())
        return values().reshape(-1)[index]

    Elements(module_of(WHOLE["row norm"]), [read]).slice(0, 1)
    assert set(used) == {1}
    assert torch.get_num_threads() == threads
