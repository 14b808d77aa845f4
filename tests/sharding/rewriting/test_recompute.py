"""Recomputation in a plan gives bitwise equal values, and less is kept."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from tests.capture.jobs import job
from tests.sharding import given
from tests.sharding.given import value
from torch import Tensor, nn
from torch.fx import Node

from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import TANGENT, StepGraph
from trainload.autograd_trace.recompute.rematerialisation import RECOMPUTES
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.launching.node.determinism import deterministic
from trainload.sharding.analysis.liveness import held
from trainload.sharding.analysis.node_costs import flops
from trainload.sharding.plans.strategies import Recompute
from trainload.sharding.rewriting.recompute import recomputed

CASES = (
    "gpt",
    "llama",
    "t5",
    "a convolutional classifier",
    "BatchNorm1d with momentum=None",
    "LSTM",
    "scan",
    "checkpoint_sequential",
)


class Layers(nn.Module):
    """Layers that each keep several values: (rows, 64) -> 0-dim."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(torch.sin(x)) * 2).exp()
        return x.square().mean()


@functools.cache
def captured(case: str) -> tuple[Job, Program, StepGraph]:
    if case != "layers":
        return given.captured(case)
    of = layers_job()
    return of, *given.captured_step(of)


def layers_job(count: int = 12) -> Job:
    torch.manual_seed(0)
    return job(Layers(count), batch={"x": torch.randn(512, 64)}, loss=lambda m, b: m(b["x"]))


def results(case: str, step: StepGraph) -> list[Tensor]:
    of, program, _ = captured(case)
    with torch.no_grad(), deterministic():
        found: list[Tensor] = step.module(
            *(value(port, of, dict(program.state), program.constants) for port in step.inputs)
        )
    return found


def copies(step: StepGraph) -> list[Node]:
    return [node for node in step.module.graph.nodes if RECOMPUTES in node.meta]


@pytest.mark.matrix("layers-full")
@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("case", [*CASES, "layers"])
def test_no_value_changes(case: str, how: Recompute) -> None:
    step = captured(case)[2]
    made = recomputed(step, how)
    assert (made.inputs, made.outputs) == (step.inputs, step.outputs)
    assert all(
        itertools.starmap(torch.equal, zip(results(case, step), results(case, made), strict=True))
    )


def test_full_recomputation_keeps_a_tenth_of_deep_layers() -> None:
    step = captured("layers")[2]
    kept, full = held(step.module).peak, held(recomputed(step, "full").module).peak
    assert full < 0.4 * kept, (
        f"{full} of {kept} bytes: of 12 layers at most 12 inputs and what one layer keeps"
    )


def test_selective_recomputation_repeats_no_product() -> None:
    made = recomputed(captured("layers")[2], "selective")
    assert copies(made)
    assert not [node for node in copies(made) if flops(node)]


def test_full_recomputation_repeats_products() -> None:
    assert [node for node in copies(recomputed(captured("layers")[2], "full")) if flops(node)]


def test_what_backward_begins_with_is_not_repeated() -> None:
    made = recomputed(captured("layers")[2], "full")
    nodes = list(made.module.graph.nodes)
    backward = nodes[next(i for i, n in enumerate(nodes) if n.name == TANGENT) :]
    first = next(i for i, node in enumerate(backward) if RECOMPUTES in node.meta)
    assert sum(flops(node) > 0 for node in backward[:first]) >= 1, (
        "a layer's backward comes before the first repetition"
    )


def test_nothing_beside_the_models_checkpoints_unless_asked() -> None:
    step = captured("layers")[2]
    assert recomputed(step, "job") is step


def test_a_graph_without_backward_stays_as_it_is() -> None:
    _, program, _ = captured("layers")
    step = derive(program, "eval", torch.device("cpu"))
    assert recomputed(step, "full") is step
