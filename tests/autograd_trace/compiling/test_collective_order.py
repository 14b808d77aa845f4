"""Compiled code starts collectives and copies, waits for them and computes in the order of the
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.collective_order import order_of_code, order_of_graph
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.compiling.inductor import compile_graph
from trainload.autograd_trace.recompute.host_copies import (
    OFFLOAD,
    OFFLOADED,
    RELOAD,
    RELOADED,
)

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


def offloaded(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Multiply by weights and, from the last to the first, multiply what each one was multiplied
    by, which is on the host meanwhile.
    """
    hosts, copied, kept = list[Tensor](), list[Tensor](), None
    for weight in weights:
        hosts.append(OFFLOAD(x))
        if kept is not None:
            copied.append(OFFLOADED([hosts[-2]], [kept]))
        kept = x
        x = torch.tanh(x @ weight)
    assert kept is not None
    copied.append(OFFLOADED([hosts[-1]], [kept]))
    products = []
    flying = RELOAD(hosts[-1], copied[-1], x.device)
    for number in reversed(range(len(hosts))):
        earlier = RELOAD(hosts[number - 1], copied[number - 1], x.device) if number else None
        x = torch.sin(x)
        products.append(RELOADED(flying, hosts[number], x.device).t() @ x)
        flying = earlier
    return products


def orders(
    function: Callable[..., list[Tensor]],
    values: Sequence[Tensor],
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> tuple[list[str], list[str]]:
    """Return the order in the graph of a function, and that in its compiled code."""
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "kernels"))
    module = make_fx(lambda *given: function(*given), tracing_mode="symbolic")(*values)
    expected = order_of_graph(module, products=True)
    compile_graph(module, folder / "graph.bin", {GROUP: 2})
    (code,) = [
        text
        for file in folder.glob("kernels/*/*.py")
        if "extern_kernels.mm(" in (text := file.read_text())
    ]
    return expected, order_of_code(code, products=True)


def test_collectives_and_waits_stay_between_the_operators_that_they_are_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [torch.randn(WIDTH // 2, WIDTH) for _ in range(BUCKETS)]
    expected, written = orders(sharded, [torch.randn(6, WIDTH), *shards], tmp_path, monkeypatch)
    assert expected[:4] == [
        "all_gather_into_tensor 0",
        "all_gather_into_tensor 1",
        "wait 0",
        "mm",
    ]
    assert written == expected


@pytest.mark.slow
def test_copies_to_and_from_the_host_stay_between_the_operators_that_they_are_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(BUCKETS)]
    expected, written = orders(offloaded, [torch.randn(6, WIDTH), *weights], tmp_path, monkeypatch)
    assert expected[:4] == ["offload 0", "mm", "offload 1", "offloaded 2"]
    assert written == expected
