"""Compiled kernels read the result of a collective after the wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from trainload.autograd_trace.compiling.inductor import compile_graph

c10d = torch.ops._c10d_functional


def dropped(x: Tensor, weight: Tensor, key: Tensor) -> list[Tensor]:
    """Return a sum over ranks with dropout, and the mask of the dropout.

    The mask is computed from the index of each element, in loops over other dims than those of the
    sum.
    """
    partial = torch.mm(x, weight).view(-1, 16, 32)
    whole = c10d.wait_tensor(c10d.all_reduce(partial, "sum", "trainload.tensor"))
    row = (torch.arange(len(partial)) + key).view(-1, 1, 1)
    mixed = row * 569420461 ^ row >> 15
    mixed = mixed + torch.arange(16 * 32).view(1, 16, 32) * 7
    for factor in (1935289751, 569420461, 1935289751, 1935289751):
        mixed = mixed & 4294967295
        mixed = (mixed ^ mixed >> 15) * factor
    mask = mixed >= 429496730
    return [torch.where(mask, whole * 1.1, 0.0), mask]


def test_a_kernel_stays_behind_the_wait_for_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    graph = make_fx(lambda *given: dropped(*given), tracing_mode="symbolic")(
        torch.randn(64, 8), torch.randn(8, 32), torch.tensor(3)
    )
    compile_graph(graph, tmp_path / "graph.bin", {"trainload.tensor": 2})
    (code,) = [
        text
        for file in tmp_path.glob("kernels/*/*.py")
        if "all_reduce_" in (text := file.read_text())
    ]
    lines = [
        line
        for line in code[code.index("def call") :].splitlines()
        if not line.strip().startswith("#")
    ]
    (waits,) = [number for number, line in enumerate(lines) if "wait_tensor.default(" in line]
    (reads,) = [number for number, line in enumerate(lines) if line.strip().startswith("cpp_fused")]
    assert waits < reads
