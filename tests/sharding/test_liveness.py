"""Memory that a graph holds while it runs, compared with torch's allocator in the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autograd_trace.memory import peak_bytes
from tests.sharding.given import captured, value
from torch.fx import GraphModule

from trainload.autograd_trace.derivation.aot import fake_mode, trace_flat
from trainload.autograd_trace.graphs import StepGraph
from trainload.launching.node.determinism import deterministic
from trainload.sharding.analysis.liveness import held
from trainload.sharding.plans.strategies import RECOMPUTES, Recompute
from trainload.sharding.rewriting.recompute import recomputed

CASES = ("gpt", "llama", "mixtral", "t5", "LSTM")
pytestmark = pytest.mark.usefixtures("frozen_gpt")


def call_of(case: str, step: StepGraph) -> Callable[[], Any]:
    job, program, _ = captured(case)
    arguments = [value(port, job, dict(program.state), program.constants) for port in step.inputs]

    def call() -> Any:
        with torch.no_grad(), deterministic():
            return step.module(*arguments)

    return call


@pytest.mark.matrix(when=lambda case: case == "gpt")
@pytest.mark.parametrize("how", RECOMPUTES)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_what_the_allocator_measures(case: str, how: Recompute) -> None:
    step = recomputed(captured(case)[2], how)
    call = call_of(case, step)
    call()  # memory that kernels keep after their first call is not the graph's
    # attention allocates 2 KiB of scratch per thread within its kernel, which no graph shows
    assert held(step.module).peak == pytest.approx(peak_bytes(call), rel=0.02, abs=4096)


def graph_of(function: Callable[..., Any], *shape: int) -> GraphModule:
    with fake_mode():
        given = torch.empty(shape)
    return trace_flat(function, [given])


def test_what_is_left_are_the_outputs() -> None:
    module = graph_of(lambda x: (x * 2, (x + 1).sum(), x), 1024)
    assert held(module).left == 4096 + 64


def test_a_view_takes_nothing_and_keeps_what_it_views() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor]:
        half = (x * 2)[:512]
        return ((half + (x * 3)[:512]).sum(),)

    found = held(graph_of(views, 1024))
    assert found.peak == 4096 + 4096 + 2048
    assert found.left == 64


def test_the_body_of_a_loop_counts_while_it_runs() -> None:
    from torch._higher_order_ops.scan import scan

    def loop(x: torch.Tensor) -> tuple[torch.Tensor]:
        def body(carry: torch.Tensor, line: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = line.repeat(100).sin()
            return carry + wide.sum(), line.clone()

        return (scan(body, torch.zeros(()), x)[0],)

    assert held(graph_of(loop, 3, 1024)).peak >= 2 * 4 * 102400
