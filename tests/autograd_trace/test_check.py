"""Step graphs are compared with autograd on the captured graph."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.autograd_trace.step_graph_calls import CPU
from tests.capture.jobs import Batch, Model, job
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import arguments_of, check_step
from trainload.autograd_trace.derivation.streamed_results import ResultStream
from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.capture.job.definition import Job, Loss
from trainload.capture.program import Program
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError


def weighted(model: nn.Module, batch: Batch) -> Loss:
    out = model(batch["x"])
    return Loss(out.square().mean(), weight=(batch["x"] > 0).sum(), metrics={"largest": out.amax()})


@functools.cache
def captured() -> tuple[Job, Program]:
    """Return a job with a read-only buffer, a weight and a metric. No test changes it."""
    given = job(Model(lambda m, x: x + m.shift, shift=torch.ones(8)), loss=weighted)
    return given, capture(given)


def scaled(step: StepGraph, port: Port, factor: float) -> StepGraph:
    """Return the step graph with one result multiplied by a number."""
    graph = Graph()
    results = list(graph.graph_copy(step.module.graph, {}))  # type: ignore[arg-type]
    place = step.outputs.index(port)
    results[place] = graph.call_function(torch.ops.aten.mul.Tensor, (results[place], factor))
    graph.output(tuple(results))
    return replace(step, module=GraphModule(step.module, graph))


@pytest.mark.parametrize(
    ("role", "name"), [(Role.LOSS, "loss"), (Role.WEIGHT, "weight"), (Role.GRADIENT, "last.bias")]
)
def test_a_step_graph_that_differs_from_autograd_is_refused(role: Role, name: str) -> None:
    given, program = captured()
    wrong = scaled(derive(program, "train", CPU), Port(role, name), 1.01)
    with pytest.raises(CaptureError, match=f"differs from autograd in the {role.value} '{name}'"):
        check_step(program, "train", wrong, dict(given.batch))


def test_a_missing_gradient_is_refused() -> None:
    given, program = captured()
    step = derive(program, "train", CPU)
    output = next(node for node in step.module.graph.nodes if node.op == "output")
    output.args = (output.args[0][:-1],)
    with pytest.raises(CaptureError, match="no gradient"):
        check_step(program, "train", replace(step, outputs=step.outputs[:-1]), dict(given.batch))


def test_a_gradient_of_rounding_alone_may_be_other_rounding() -> None:
    """A constant added to all scores before a softmax has gradient 0, up to rounding errors."""
    torch.manual_seed(0)  # with other values, the rounding errors may be exactly 0
    given = job(
        Model(lambda m, x: (x + m.added).softmax(-1), added=nn.Parameter(torch.tensor(0.1)))
    )
    program = capture(given)
    step = derive(program, "train", CPU)
    port = Port(Role.GRADIENT, "added")
    rounding = results_of(program, step, given.batch)[port]
    assert 0 < float(rounding.abs()) < 1e-6
    check_step(program, "train", scaled(step, port, -2.0), dict(given.batch))


def results_of(program: Program, step: StepGraph, batch: Mapping[str, Any]) -> dict[Port, Tensor]:
    results: dict[Port, Tensor] = {}
    ResultStream(step).stream(arguments_of(program, step, batch, 4, 4), results.__setitem__)
    return results


def test_streamed_results_are_those_of_the_graph() -> None:
    given, program = captured()
    step = derive(program, "train", CPU)
    with torch.no_grad():
        expected = step.module(*arguments_of(program, step, given.batch, 4, 4))
    results = results_of(program, step, given.batch)
    assert all(torch.equal(results[p], v) for p, v in zip(step.outputs, expected, strict=True))


def test_a_gradient_is_freed_before_the_next_one_is_complete() -> None:
    given, program = captured()
    step = derive(program, "train", CPU)
    alive: list[Callable[[], Tensor | None]] = []
    most = 0

    def receive(port: Port, value: Tensor) -> None:
        nonlocal most
        if port.role is Role.GRADIENT:
            alive.append(weakref.ref(value))
            most = max(most, sum(held() is not None for held in alive))

    ResultStream(step).stream(arguments_of(program, step, given.batch, 4, 4), receive)
    assert (len(alive), most) == (4, 1)
