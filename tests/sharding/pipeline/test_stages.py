"""Step graphs are cut into stages, which compute the same values in sequence, bit for bit."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.sharding import given
from tests.sharding.given import value
from torch import Tensor

from trainload.autograd_trace.graphs import Port, Role, StepGraph
from trainload.autograd_trace.recompute.hold import hold_back
from trainload.autograd_trace.recompute.rematerialisation import RECOMPUTES
from trainload.capture.job.definition import Job
from trainload.capture.program import Program
from trainload.core.errors import PlanError
from trainload.launching.node.determinism import deterministic
from trainload.sharding.pipeline.balance import choose_stages
from trainload.sharding.pipeline.stages import Part, Stages, cut
from trainload.sharding.rewriting.local_step import Local, completed
from trainload.sharding.rewriting.rewrite import BETWEEN

aten = torch.ops.aten
CASES = {
    "gpt": (2, 3, 4),
    "llama": (2, 3),
    "mixtral": (2, 3),
    "t5": (2, 3),
    "a convolutional classifier": (2,),
    "BatchNorm1d with momentum=None": (2, 3),
    "spectral_norm by parametrization": (2, 3),
    "LSTM": (2,),
    "cond": (2,),
    "scan": (2,),
    "tied parameters": (2, 3),
    "checkpoint_sequential": (2, 3),
}
"""Job -> the numbers of stages that it is cut into."""
BOTH = [(case, count) for case, counts in CASES.items() for count in counts]
SOME = (("gpt", 2), ("gpt", 3), ("BatchNorm1d with momentum=None", 2), ("checkpoint_sequential", 2))
some_of_both = pytest.mark.matrix(when=lambda case, count: (case, count) in SOME)
pytestmark = pytest.mark.usefixtures("frozen_gpt")


@dataclass(frozen=True, slots=True)
class Captured:
    job: Job
    program: Program
    step: StepGraph

    def value(self, port: Port) -> Tensor:
        """Return the value of an input of the whole graph."""
        return value(port, self.job, dict(self.program.state), self.program.constants)

    def whole(self) -> dict[Port, Tensor]:
        """Return the outputs of the whole graph."""
        return dict(
            zip(
                self.step.outputs, self.step.module(*map(self.value, self.step.inputs)), strict=True
            )
        )


@functools.cache
def captured(case: str) -> Captured:
    return Captured(*given.captured(case))


@functools.cache
def stages_of(case: str, count: int) -> tuple[Stages, dict[str, tuple[int, ...]]]:
    step = captured(case).step
    homes = choose_stages([step], count)
    return cut(step, homes, count), homes


def run(case: str, count: int, *, halves: bool, stages: Stages | None = None) -> dict[Port, Tensor]:
    """Run forward and backward of all stages in sequence, and return all of their outputs."""
    of, (made, homes) = captured(case), stages_of(case, count)
    stages = stages or made
    held: list[dict[str, Tensor]] = [{} for _ in range(count)]
    found: dict[Port, Tensor] = {}

    def call(stage: int, part: Part) -> None:
        graph = stages.parts.get((stage, part))
        if graph is None:
            return
        assert all(
            stage in homes[port.name] for port in graph.inputs if port.role is Role.PARAMETER
        )
        given = [
            held[stage][port.name] if port.role in BETWEEN else of.value(port)
            for port in graph.inputs
        ]
        for port, result in zip(graph.outputs, graph.module(*given), strict=True):
            if port.role in BETWEEN:
                held[stage][port.name] = result
            else:
                found[port] = (
                    found[port] + result if port.role is Role.GRADIENT and port in found else result
                )

    for stage in range(count):
        call(stage, Part.FORWARD)
        if stage + 1 < count:
            held[stage + 1] |= {sent.name: held[stage][sent.name] for sent in stages.up[stage]}
    for stage in reversed(range(count)):
        call(stage, Part.INPUT if halves else Part.BACKWARD)
        if stage:
            held[stage - 1] |= {
                sent.name: held[stage][sent.name] for sent in stages.down[stage - 1]
            }
        if halves:
            call(stage, Part.WEIGHT)
    return found


@some_of_both
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "in halves"])
@pytest.mark.parametrize(("case", "count"), BOTH)
def test_stages_compute_what_the_graph_computes(case: str, count: int, halves: bool) -> None:
    with deterministic():  # Otherwise the sum of a scatter-add varies.
        wanted, found = captured(case).whole(), run(case, count, halves=halves)
    assert set(found) == set(wanted)
    for port, result in wanted.items():
        assert torch.equal(found[port], result), port


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "in halves"])
def test_stages_compute_a_gradient_that_forward_has_computed(halves: bool) -> None:
    """The last stage's forward computes the gradients of logits in chunks."""
    case, (_, homes) = captured("gpt"), stages_of("gpt", 2)
    step = completed(case.step, Local(loss_chunks=3))
    with deterministic():
        wanted = step.module(*map(case.value, step.inputs))
        found = run("gpt", 2, halves=halves, stages=cut(step, homes, 2))
    for port, result in zip(step.outputs, wanted, strict=True):
        assert torch.equal(found[port], result), port


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "in halves"])
def test_what_backward_computes_again_is_held_back_in_each_stage(halves: bool) -> None:
    case = captured("checkpoint_sequential")
    _, homes = stages_of("checkpoint_sequential", 2)
    stages = cut(case.step, homes, 2)
    repeating = {
        key
        for key, graph in stages.parts.items()
        if any(RECOMPUTES in node.meta for node in graph.module.graph.nodes)
    }
    for graph in stages.parts.values():
        hold_back(graph.module)
    found = run("checkpoint_sequential", 2, halves=halves, stages=stages)
    assert all(torch.equal(found[port], result) for port, result in case.whole().items())
    held = {
        key
        for key, graph in stages.parts.items()
        if any(node.target is aten.isnan.default for node in graph.module.graph.nodes)
    }
    assert repeating and held == repeating


@some_of_both
@pytest.mark.parametrize(("case", "count"), BOTH)
def test_what_is_sent_has_the_shape_that_is_said(case: str, count: int) -> None:
    stages, _ = stages_of(case, count)
    sizes = {
        symbol: int(captured(case).job.batch[name].shape[at])
        for symbol, (name, at) in stages.symbols.items()
    }
    assert sizes == dict(stages.example)
    made: dict[str, Any] = defaultdict(set)
    for graph in stages.parts.values():
        output = next(node for node in graph.module.graph.nodes if node.op == "output")
        for port, node in zip(graph.outputs, output.args[0], strict=True):
            made[port.name].add(
                (str(node.meta["val"].dtype).removeprefix("torch."), node.meta["val"].ndim)
            )
    for sent in (sent for boundary in (*stages.up, *stages.down) for sent in boundary):
        assert (sent.dtype, len(sent.shape)) in made[sent.name]


def test_a_boundary_between_blocks_is_crossed_by_one_tensor_each_way() -> None:
    stages, _ = stages_of("gpt", 2)
    (up,), (down,) = (stages.up, stages.down)
    assert [(len(crossing), crossing[0].shape[1:]) for crossing in (up, down)] == [
        (1, (16, 32))
    ] * 2


def test_a_parameter_that_two_stages_share_has_a_gradient_of_each() -> None:
    stages, homes = stages_of("gpt", 3)
    assert homes["tokens.weight"] == (0, 2)
    port = Port(Role.GRADIENT, "tokens.weight")
    assert [port in stages.parts[stage, Part.BACKWARD].outputs for stage in range(3)] == [
        True,
        False,
        True,
    ]


def test_the_half_that_the_stage_before_waits_for_makes_no_gradient() -> None:
    stages, _ = stages_of("gpt", 3)
    halves = [stages.parts[stage, Part.INPUT] for stage in (1, 2)]
    assert not [port for half in halves for port in half.outputs if port.role is Role.GRADIENT]
    assert (0, Part.INPUT) not in stages.parts


def test_random_numbers_are_drawn_once_by_a_stage() -> None:
    stages, _ = stages_of("gpt", 2)
    for part in (Part.BACKWARD, Part.INPUT, Part.WEIGHT):
        assert not [
            p
            for s in range(2)
            if (s, part) in stages.parts
            for p in stages.parts[s, part].inputs
            if p.role is Role.SEED
        ]


def test_a_gradient_that_needs_what_comes_later_is_refused() -> None:
    step = captured("gradient penalty").step
    homes = {
        port.name: (int(port.name.startswith("last")),)
        for port in step.inputs
        if port.role is Role.PARAMETER
    }
    with pytest.raises(
        PlanError,
        match=(
            r"gradient last\.weight: the pipeline's stages cannot compute a value where it is"
            r" needed"
        ),
    ):
        cut(step, homes, 2)


@pytest.mark.slow
def test_a_size_that_the_data_decide_does_not_cross() -> None:
    with pytest.raises(PlanError, match="with a data-dependent size would be sent between stages"):
        stages_of("while_loop of a fixed number of rounds", 2)
