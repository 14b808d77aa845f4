"""Compiled code starts collectives, waits for them and computes in the order of the graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.compiling.inductor import compile_graph

c10d = torch.ops._c10d_functional
BUCKETS = 4
WIDTH = 16
GROUP = "trainload.data"
_CALL = re.compile(r"(\w+) = torch\.ops\._c10d_functional\.(\w+?)\.default\(")
_WAIT = re.compile(r"_c10d_functional\.wait_tensor\.default\((\w+)\)")


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


def of_graph(module: GraphModule) -> list[str]:
    """Return what a graph does: names of collectives, waits with the number of what they wait for,
    and products.
    """
    numbers: dict[object, int] = {}
    done: list[str] = []
    for node in module.graph.nodes:
        if node.target is c10d.wait_tensor.default:
            done.append(f"wait {numbers[node.args[0]]}")
        elif str(node.target).startswith("_c10d_functional"):
            numbers[node] = len(numbers)
            done.append(f"{node.target.overloadpacket.__name__} {numbers[node]}")
        elif node.target is torch.ops.aten.mm.default:
            done.append("mm")
    return done


def of_code(lines: Sequence[str]) -> list[str]:
    """Return the same of the code that Inductor wrote for it."""
    numbers: dict[str, int] = {}
    done: list[str] = []
    for line in lines:
        if found := _CALL.search(line):
            numbers[found[1]] = len(numbers)
            done.append(f"{found[2]} {numbers[found[1]]}")
        elif found := _WAIT.search(line):
            done.append(f"wait {numbers[found[1]]}")
        elif "extern_kernels.mm(" in line:
            done.append("mm")
    return done


def test_collectives_and_waits_stay_between_the_operators_that_they_are_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    shards = [torch.randn(WIDTH // 2, WIDTH) for _ in range(BUCKETS)]
    module = make_fx(lambda *given: sharded(*given), tracing_mode="symbolic")(
        torch.randn(6, WIDTH), *shards
    )
    expected = of_graph(module)
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
    assert of_code(code[code.index("def call") :].splitlines()) == expected
