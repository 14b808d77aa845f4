"""Operations of operators that multiply matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.planner.device import names, read

aten = torch.ops.aten
BF16 = torch.bfloat16


def operations(function: Callable[..., object], *tensors: Tensor) -> float:
    """Return the operations of all nodes of a function's graph."""
    traced = make_fx(function)(*tensors)
    return sum(flops(node) for node in traced.graph.nodes if node.op == "call_function")


def on_meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


OFFSETS = on_meta(4, dtype=torch.int32)
GROUPED = {
    "rows of experts": ((32, 16), (4, 16, 8), 2 * 32 * 16 * 8),
    "gradients of experts": ((16, 32), (32, 8), 2 * 16 * 32 * 8),
    "columns of experts": ((4, 8, 16), (16, 32), 2 * 8 * 16 * 32),
}


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_products_have_the_operations_of_their_groups(case: str) -> None:
    left, right, expected = GROUPED[case]
    found = operations(
        lambda a, b, offs: aten._grouped_mm(a, b, offs), on_meta(*left), on_meta(*right), OFFSETS
    )
    assert found == expected


def test_scaled_products_have_the_operations_of_products() -> None:
    scale = torch.empty((), device="meta")
    left = on_meta(32, 16, dtype=torch.float8_e4m3fn)
    right = on_meta(48, 16, dtype=torch.float8_e4m3fn).t()
    assert operations(
        lambda a, b: aten._scaled_mm(a, b, scale, scale, out_dtype=BF16), left, right
    ) == (2 * 32 * 16 * 48)


@pytest.mark.parametrize(
    ("name", "products"), [("flex_attention", 2), ("flex_attention_backward", 5)]
)
def test_attention_with_a_score_function_counts_as_fused_attention(
    name: str, products: int
) -> None:
    graph = Graph()
    inputs: list[Node] = []
    for each in ("query", "key", "value"):
        node = graph.placeholder(each)
        node.meta["val"] = on_meta(2, 4, 64, 16)
        inputs.append(node)
    call = graph.call_function(getattr(torch.ops.higher_order, name), tuple(inputs))
    call.meta["val"] = (on_meta(2, 4, 64, 16),)
    assert flops(call) == 2 * products * (2 * 4 * 64 * 16) * 64


@pytest.mark.parametrize("name", [n for n in names() if "float8_e5m2" in read(n).flops])
def test_products_in_float8_are_faster_than_in_bfloat16(name: str) -> None:
    device = read(name)
    assert (
        device.rate("float8_e4m3fn") == device.rate("float8_e5m2") > 1.9 * device.rate("bfloat16")
    )
