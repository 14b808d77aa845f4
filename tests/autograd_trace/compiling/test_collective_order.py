"""Compiled code starts collectives, waits for them and computes in the order of the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.collective_order import order_of_code, order_of_graph
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.compiling.inductor import compile_graph

c10d = torch.ops._c10d_functional
BUCKETS = 4
WIDTH = 16
GROUP = "trainload.data"


def sharded(x: Tensor, *shards: Tensor) -> list[Tensor]:
    """Multiply by weights that are gathered one ahead, and reduce a product for each of them."""
    started = [c10d.all_gather_into_tensor(shards[0], 2, GROUP)]
    kept = []
    for number in range(BUCKETS):
        if number + 1 < BUCKETS:
            started.append(c10d.all_gather_into_tensor(shards[number + 1], 2, GROUP))
        weight = c10d.wait_tensor(started[number])
        kept.append(x)
        x = x @ weight
    pending, reduced = None, []
    for value in reversed(kept):
        gradient = value.t() @ x
        if pending is not None:
            reduced.append(c10d.wait_tensor(pending))
        pending = c10d.reduce_scatter_tensor(gradient, "sum", 2, GROUP)
        x = x + 1
    return [*reduced, c10d.wait_tensor(pending), x]


def test_collectives_and_waits_stay_between_the_operators_that_they_are_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    shards = [torch.randn(WIDTH // 2, WIDTH) for _ in range(BUCKETS)]
    module = make_fx(lambda *given: sharded(*given), tracing_mode="symbolic")(
        torch.randn(6, WIDTH), *shards
    )
    expected = order_of_graph(module, products=True)
    compile_graph(module, tmp_path / "graph.bin", {GROUP: 2})
    (code,) = [
        text
        for file in tmp_path.glob("kernels/*/*.py")
        if "reduce_scatter" in (text := file.read_text())
    ]
    assert expected[:4] == [
        "all_gather_into_tensor 0",
        "all_gather_into_tensor 1",
        "wait 0",
        "mm",
    ]
    assert order_of_code(code, products=True) == expected
