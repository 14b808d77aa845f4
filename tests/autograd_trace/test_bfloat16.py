"""Graphs in bfloat16 are compared in float64.

A different order of rounding passes, a different computation fails.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.capture import jobs
from torch import Tensor, nn, optim
from torch.nn import functional

from trainload import CaptureError, Job, Loss
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.derivation.step_check import check_step
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.parity.float64 import doubled, in_float64
from trainload.capture.program import GraphCapture, Program
from trainload.capture.tracing.trace import capture

CPU = torch.device("cpu")
aten = torch.ops.aten


class Model(nn.Module):
    """Attention with fewer key-value heads than heads, dropout, a residual and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 8)
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (2, 4)).transpose(1, 2)
        found = functional.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.head(self.norm(x + self.drop(found.transpose(1, 2).flatten(2))))
        return out


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch["x"])
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), batch["y"].flatten(), reduction="none"
    )
    weights = batch["w"].flatten()
    return Loss((losses * weights).sum() / weights.sum(), weight=weights.sum())


def job(weight: float) -> Job:
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(4, 6, 16, generator=generator),
        torch.randint(0, 5, (4, 6), generator=generator),
    )
    return Job(
        Model(),
        {"x": x, "y": y, "w": torch.full((4, 6), weight)},
        lambda m: optim.SGD(m.parameters(), lr=0.1),
        loss=weighted,
    )


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(job(3.1))


@pytest.fixture(scope="module")
def step(program: Program) -> StepGraph:
    return derive(program, "train", CPU)


@pytest.mark.matrix("31.0")
@pytest.mark.parametrize("weight", [0.3, 1.0, 3.0, 31.0, 1000.0])
def test_a_loss_of_any_weight_is_derived(weight: float) -> None:
    given = job(weight)
    program = capture(given)
    check_step(program, "train", derive(program, "train", CPU), dict(given.batch))


def matrix(m: Any) -> Tensor:
    """Return a positive definite matrix in bfloat16."""
    found: Tensor = m.first.weight @ m.first.weight.T + torch.eye(8)
    return found.bfloat16()


def aligned(x: Tensor) -> Tensor:
    rows = x.shape[0]
    lengths = torch.full((rows,), 2), torch.full((rows,), 1)
    loss: Tensor = functional.ctc_loss(
        x.view(rows, 2, 4).transpose(0, 1).log_softmax(-1),
        torch.ones(rows, 1, dtype=torch.int64),
        *lengths,
    )
    return x + loss


STOOD_FOR: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linalg.solve": lambda m, x: torch.linalg.solve(matrix(m).float(), x.T).T,  # two dtypes
    "linalg.inv": lambda m, x: x @ torch.linalg.inv(matrix(m)),
    "inverse": lambda m, x: x @ matrix(m).inverse(),
    "linalg.cholesky": lambda m, x: x @ torch.linalg.cholesky(matrix(m)),
    "ctc_loss": lambda m, x: aligned(x),
}


@pytest.mark.parametrize("name", STOOD_FOR)
def test_what_stands_for_an_operator_computes_in_float32_where_autocast_would_have_it_do_so(
    name: str,
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = jobs.mean_square(model, batch)
        return found

    given = jobs.job(jobs.Model(STOOD_FOR[name]), loss=loss)
    program = capture(given)
    check_step(program, "train", derive(program, "train", CPU), dict(given.batch))


def test_a_graph_in_float64_gives_what_the_model_gives_in_float64() -> None:
    given = job(3.1)
    given.model.drop.eval()  # type: ignore[union-attr]  # a module
    program = capture(given)
    twin = in_float64(program.graphs["train"])
    batch, state = doubled(dict(given.batch)), doubled(dict(program.state))
    entries = iter(batch[name] for name in sorted(batch))
    arguments = [
        next(entries) if spec.target is None else state[spec.target]
        for spec in twin.exported.graph_signature.input_specs
    ]
    loss = twin.exported.graph_module(*arguments)[0]
    assert loss.dtype is torch.float64
    # Autocast does not change float64. The cast to float32 rounds.
    expected = weighted(given.model.double(), batch).value
    torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=0.0)


def test_a_graph_in_float64_draws_what_the_graph_draws(program: Program) -> None:
    captured = program.graphs["train"]
    twin, batch = in_float64(captured), dict(job(3.1).batch)

    def loss(graph: GraphCapture, tensors: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
        entries = iter(tensors[name] for name in sorted(tensors))
        torch.manual_seed(5)
        specs = graph.exported.graph_signature.input_specs
        result: Tensor = graph.exported.graph_module(
            *(next(entries) if s.target is None else state[s.target] for s in specs)
        )[0]
        return result

    low, exact = (
        loss(captured, batch, dict(program.state)),
        loss(twin, doubled(batch), doubled(dict(program.state))),
    )
    # Another mask would change it by 5 %.
    torch.testing.assert_close(low.double(), exact, rtol=5e-3, atol=0.0)


def scale_a_gradient(step: StepGraph) -> None:
    graph = step.module.graph
    output, place = graph.output_node(), [port.role for port in step.outputs].index(Role.GRADIENT)
    (results,) = output.args
    gradients: list[Any] = list(results)  # type: ignore[arg-type]  # a tuple of nodes
    with graph.inserting_before(output):
        gradients[place] = graph.call_function(aten.mul.Tensor, (gradients[place], 1.05))
    output.args = (tuple(gradients),)


def drop_a_term(step: StepGraph) -> None:
    sums = [
        node
        for node in step.module.graph.nodes
        if node.target is aten.add.Tensor and len(node.all_input_nodes) == 2
    ]
    sums[-1].replace_all_uses_with(sums[-1].args[0])


def forget_a_factor(step: StepGraph) -> None:
    products = [
        node
        for node in step.module.graph.nodes
        if node.target is aten.mul.Tensor and len(node.all_input_nodes) == 2
    ]
    last = next(
        node
        for node in reversed(products)
        if node.args[0].meta["val"].shape == node.meta["val"].shape
    )
    last.replace_all_uses_with(last.args[0])


@pytest.mark.parametrize("spoil", [scale_a_gradient, drop_a_term, forget_a_factor])
def test_a_fault_is_found(
    spoil: Callable[[StepGraph], None], program: Program, step: StepGraph
) -> None:
    broken = replace(step, module=copy.deepcopy(step.module))
    spoil(broken)
    broken.module.recompile()
    with pytest.raises(CaptureError, match="the joint graph differs from autograd"):
        check_step(program, "train", broken, dict(job(3.1).batch))
