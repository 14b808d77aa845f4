"""The jobs of docs/guides/graphs.md can be captured, and their recipes built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.house.source import python_blocks
from tests.optimizers import optimizer_of

from trainload.capture.tracing.trace import capture

BLOCKS = python_blocks("docs/guides/graphs.md")


@pytest.mark.matrix("0")
@pytest.mark.parametrize("code", BLOCKS, ids=[str(n) for n in range(len(BLOCKS))])
def test_an_example_is_captured(code: str) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "graphs.md", "exec"), names)
    job = names["job"]
    program = capture(job)
    recipe, _ = optimizer_of(job, program)
    assert {turn.graph for turn in recipe.turns} == set(job.graphs)
    assert {graph.graph for graph in program.graphs.values()} == set(job.graphs)
