"""Law 2: the graph has the loss and all gradients of eager on every example.

This is checked before a package is written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.laws.gpt import ROWS, gpt_job, schedule, token_rows
from tests.laws.runs import TOLERANCE, curve, difference
from torch import Tensor, nn

import trainload
from trainload.autograd_trace.derivation.aot import derive
from trainload.autograd_trace.graphs import Role, StepGraph
from trainload.capture.job.definition import Loss
from trainload.core.errors import CaptureError
from trainload.launching.data.sampler import rows as rows_at
from trainload.packaging.package import Package

EXAMPLES = list(enumerate((4, 2, 7, 1, 13, 8), 1))
"""(seed, rows) of the batches that are compared."""


def relative(expected: Tensor, got: Tensor) -> float:
    a, b = expected.detach().double(), got.detach().double()
    return float((a - b).norm() / a.norm().clamp(min=1e-12))


def eager_gradients(job: trainload.Job, tokens: Tensor) -> tuple[Loss, dict[str, Tensor]]:
    """Return the loss of the job's own model in train mode, and the gradients of its parameters.

    Only parameters that are trained have a gradient.
    """
    assert job.loss is not None
    model = job.model.train()
    model.zero_grad()
    loss = job.loss(model, {"tokens": tokens})
    assert isinstance(loss, Loss)
    torch.autograd.backward(loss.value)
    return loss, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def run_step_graph(step: StepGraph, package: Package, tokens: Tensor) -> dict[str, Tensor]:
    """Run a step graph on a batch. Return its outputs by "role/name".

    Gradients are those of the mean loss.
    """
    scalars = {
        Role.SEED: torch.tensor(1),
        Role.STEP: torch.tensor(3),
        Role.ROW: torch.tensor(0),
        Role.SCALE: torch.tensor(1.0),
    }
    constants = package.program().constants
    arguments = []
    for port in step.inputs:
        match port.role:
            case Role.PARAMETER | Role.BUFFER:
                arguments.append(package.weights.tensor(port.name))
            case Role.CONSTANT:
                arguments.append(constants[port.name])
            case Role.BATCH:
                arguments.append(tokens)
            case role:
                arguments.append(scalars[role])
    with torch.no_grad():
        results = step.module(*arguments)
    found: dict[str, Tensor] = {
        f"{port.role.value}/{port.name}": value
        for port, value in zip(step.outputs, results, strict=True)
    }
    weight = found["weight/weight"]
    return {
        name: value / weight if name.startswith("gradient/") else value
        for name, value in found.items()
    }


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Package:
    job = replace(gpt_job(dropout=0.0, steps=12), predict=None)  # no test here predicts
    return trainload.freeze(job, tmp_path_factory.mktemp("plain") / "gpt.tl")


@pytest.fixture(scope="module")
def step_graph(without_dropout: Package) -> StepGraph:
    return derive(without_dropout.program(), "train", torch.device("cpu"))


@pytest.mark.parametrize(("seed", "rows"), EXAMPLES)
def test_the_package_s_graph_has_eager_s_loss_and_gradients_with_dropout(
    gpt: Package, seed: int, rows: int
) -> None:
    tokens = token_rows(rows, seed)
    job = gpt_job()
    torch.manual_seed(seed)
    eager, gradients = eager_gradients(job, tokens)
    graph = gpt.graph("train").module(check_guards=False)
    torch.manual_seed(seed)
    loss, weight, accuracy = graph({"tokens": tokens})
    loss.backward()
    found = {name: p.grad for name, p in graph.named_parameters() if p.grad is not None}
    assert eager.weight is not None
    assert relative(eager.value, loss) <= 1e-6
    assert torch.equal(weight, eager.weight) and torch.equal(accuracy, eager.metrics["accuracy"])
    for name, gradient in gradients.items():
        # A tied parameter is one tensor, under one of its names.
        own = found.get(name, found.get("head.weight" if name == "tokens.weight" else name))
        assert own is not None, name
        assert relative(gradient, own) <= 1e-5, name


@pytest.mark.parametrize(("seed", "rows"), EXAMPLES)
def test_the_step_graph_has_eager_s_loss_gradients_and_buffers(
    without_dropout: Package, step_graph: StepGraph, seed: int, rows: int
) -> None:
    tokens = token_rows(rows, seed)
    job = gpt_job(dropout=0.0)
    eager, gradients = eager_gradients(job, tokens)
    found = run_step_graph(step_graph, without_dropout, tokens)
    assert eager.weight is not None
    assert relative(eager.value, found["loss/loss"]) <= 1e-6
    assert relative(eager.weight, found["weight/weight"]) == 0
    assert {
        name.removeprefix("gradient/") for name in found if name.startswith("gradient/")
    } == set(gradients)
    for name, gradient in gradients.items():
        assert relative(gradient, found[f"gradient/{name}"]) <= 1e-5, name
    for name, buffer in job.model.named_buffers():
        assert relative(buffer.float(), found[f"buffer/{name}"].float()) <= 1e-6, name


def test_twelve_steps_from_the_package_are_twelve_steps_of_eager(
    without_dropout: Package, gpt_data: Path, tmp_path: Path
) -> None:
    plan = trainload.plan(without_dropout, trainload.Cluster(), "single")
    trainload.launch(
        without_dropout, plan, gpt_data, run_dir=tmp_path / "run", backend="local", compile=False
    )
    job = gpt_job(dropout=0.0, steps=12)
    data = token_rows(91, seed=1)
    assert job.optimizer is not None
    optimizer = job.optimizer(job.model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step in range(12):
        loss, _ = eager_gradients(
            job, data[torch.from_numpy(rows_at(job.seed, len(data), step * ROWS, ROWS))]
        )
        assert job.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(step)
        optimizer.step()
        losses.append(float(loss.value.detach()))
    assert difference(losses, curve(tmp_path / "run")) <= TOLERANCE


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.grad_fn is not None:
            # on autograd's own graph, which no capture sees
            out.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        return out


class _Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("kind", [_Doubled, _Counting])
@pytest.mark.filterwarnings("ignore")  # from torch, about what it drops
def test_a_freeze_whose_graph_differs_is_refused_and_writes_nothing(
    tmp_path: Path, kind: type[nn.Linear]
) -> None:
    job = gpt_job()
    outputs, inputs = job.model.get_submodule("narrow").get_parameter("weight").shape
    job.model.register_module("narrow", kind(inputs, outputs))
    with pytest.raises(CaptureError, match="narrow"):
        trainload.freeze(job, tmp_path / "gpt.tl")
    assert list(tmp_path.iterdir()) == []
